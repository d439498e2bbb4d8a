--[[ reconcile.lua: repair what cannot be, of one key. Follows clock.lua and rests.lua.
  KEYS[1]  lessor:{p}:cooldowns          hash  subject -> rest
  KEYS[2]  lessor:{p}:fingerprints       hash  fingerprint -> the key that has it
  KEYS[3]  lessor:{p}:keys               zset  every key -> ms at which a sidecar last spoke of it
  KEYS[4]  lessor:{p}:key:<key>          hash  settings, status, own rests
  KEYS[5]  lessor:{p}:key:<key>:leases   zset  lease id -> ms at which it expires
  KEYS[6]  lessor:{p}:pool:<pool>:keys   zset  the keys of the pool it was in when the caller looked
  KEYS[7]  lessor:{p}:groups             hash  group -> the learned cap of all its keys
  KEYS[8]  lessor:{p}:group:<group>:leases  zset  of the group it was in when the caller looked; KEYS[5] for none
  then for each lease that the caller thinks is an orphan:
           lessor:{p}:lease:<lease>      hash  what the lease was granted for
  ARGV     1 key, 2 pool it was in or "", 3 ms after which a key that nobody serves goes, then the leases' ids
  Returns  now in ms, number of differences repaired
  Atomic   looks again at all that the caller saw, so what has changed meanwhile is left alone
  Repairs  a slot without a lease: nobody could renew it, so it is freed. A lease without a slot: its holder lives
           by it, so it gets its slot back. A key that no sidecar has spoken of for the time named, and that
           holds no lease: it goes, with its rests. What has expired is dropped, and not counted
  Clock    Redis TIME ]]
local COOLDOWNS, FINGERPRINTS, INDEX, KEY, LEASES, POOL = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local GROUPS, CROWD = KEYS[7], KEYS[8]
local KEY_ID, POOL_NAME, UNSEEN = ARGV[1], ARGV[2], tonumber(ARGV[3])

local repaired = 0
redis.call("ZREMRANGEBYSCORE", LEASES, "-inf", NOW)
redis.call("ZREMRANGEBYSCORE", CROWD, "-inf", NOW)
for at = 4, #ARGV do
  local lease, id = KEYS[5 + at], ARGV[at]
  local slot = redis.call("ZSCORE", LEASES, id)
  local row = redis.call("HMGET", lease, "key_id", "expires_at_ms")
  local ends = tonumber(row[2])
  if slot and not row[1] then
    redis.call("ZREM", LEASES, id)
    repaired = repaired + 1
  elseif not slot and row[1] == KEY_ID and ends and ends > NOW then
    redis.call("ZADD", LEASES, ends, id)
    repaired = repaired + 1
  end
end

local known = redis.call("HMGET", KEY, "seen_at_ms", "last_used_at_ms", "pool", "fingerprint")
local seen = math.max(tonumber(known[1]) or 0, tonumber(known[2]) or 0)
if NOW >= seen + UNSEEN and (known[3] or "") == POOL_NAME and redis.call("ZCARD", LEASES) == 0 then
  redis.call("DEL", KEY, LEASES)
  redis.call("ZREM", INDEX, KEY_ID)
  if POOL_NAME ~= "" then redis.call("ZREM", POOL, KEY_ID) end
  if known[4] and redis.call("HGET", FINGERPRINTS, known[4]) == KEY_ID then
    redis.call("HDEL", FINGERPRINTS, known[4])
  end
  local prefix = "key:" .. KEY_ID .. "@"
  for _, subject in ipairs(redis.call("HKEYS", COOLDOWNS)) do
    if string.sub(subject, 1, #prefix) == prefix then redis.call("HDEL", COOLDOWNS, subject) end
  end
  repaired = repaired + 1
end
for _, group in ipairs(redis.call("HKEYS", GROUPS)) do
  if not rests.group_cap(redis.call("HGET", GROUPS, group)) then redis.call("HDEL", GROUPS, group) end
end
for _, subject in ipairs(redis.call("HKEYS", COOLDOWNS)) do
  local rest = rests.read(redis.call("HGET", COOLDOWNS, subject))
  if not rest or rests.is_forgotten(rest) then redis.call("HDEL", COOLDOWNS, subject) end
end
return { NOW, repaired }
