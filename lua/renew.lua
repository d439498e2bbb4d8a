--[[ renew.lua: extend the leases of one sidecar, of one provider, in one call. Follows clock.lua and rests.lua.
  KEYS[1]  lessor:{p}:epoch              hash  the life of the data, its grace, the server's replication id
  KEYS[2]  lessor:{p}:fence              string  last fencing token
  KEYS[3]  lessor:{p}:probes             zset  lease that probes -> ms at which it expires
  KEYS[4]  lessor:{p}:keys               zset  every key -> ms at which a sidecar last spoke of it
  then for each key of which a lease is named:
           lessor:{p}:key:<key>          hash  its settings
           lessor:{p}:key:<key>:leases   zset  lease id -> ms at which it expires
  then for each group of which a lease is named:
           lessor:{p}:group:<group>:leases  zset  lease id -> ms at which it expires
  then for each lease:
           lessor:{p}:lease:<lease>      hash  what the lease was granted for
  ARGV     1 epoch known to the caller or "", 2 id for a new epoch, 3 owner, 4 ttl in ms, 5 deadline in ms,
           6 "1" to re-create what is not known, 7 replication id or "", 8 number of keys, 9 number of groups,
           10 number of leases, then for each key its id, then for each group its name,
           then for each lease: id, index of its key, pool, fingerprint, fencing token, app, index of its group or 0
  Returns  now in ms, epoch id, then for each lease the ms at which it expires, or 0 where it is lost, or -1
           where the call came after its deadline and changed nothing
  Atomic   all in one step. A lease that is another's, or does not match, is lost and not touched
  Again    harmless: a renewal never brings a lease closer to its end
  Grace    a call that names another epoch starts it, once an epoch; so does the first call that re-creates
           after the replication id changed (a failover, or a restart from a snapshot)
  Clock    Redis TIME ]]
local EPOCH, FENCE, PROBES, INDEX = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local KNOWN_EPOCH, FRESH_EPOCH, OWNER = ARGV[1], ARGV[2], ARGV[3]
local TTL, DEADLINE = tonumber(ARGV[4]), tonumber(ARGV[5])
local REASSERT, REPLICATION = ARGV[6] == "1", ARGV[7]
local COUNT, GROUPS, LEASES = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local ENDS = NOW + TTL

local known = redis.call("HMGET", EPOCH, "id", "grace_until_ms", "replication_id")
local answers = { NOW, known[1] or FRESH_EPOCH }
if NOW > DEADLINE then
  for at = 1, LEASES do answers[2 + at] = -1 end
  return answers
end
local began = {}
if not known[1] then began[1], began[2] = "id", FRESH_EPOCH end
local moved = KNOWN_EPOCH ~= "" and KNOWN_EPOCH ~= answers[2]
local failed_over = REASSERT and REPLICATION ~= "" and known[3] and known[3] ~= REPLICATION
if (moved and not known[2]) or failed_over then
  began[#began + 1] = "grace_until_ms"
  began[#began + 1] = string.format("%.0f", ENDS)
end
if REASSERT and REPLICATION ~= "" and known[3] ~= REPLICATION then
  began[#began + 1] = "replication_id"
  began[#began + 1] = REPLICATION
end
if #began > 0 then redis.call("HSET", EPOCH, unpack(began)) end

local function re_create(lease, key, leases, id, key_id)
  redis.call("HSET", key, "seen_at_ms", string.format("%.0f", NOW))
  redis.call("ZADD", INDEX, NOW, key_id)
  redis.call("ZREM", leases, id)
  redis.call("DEL", lease.key)
  local cap = math.max(math.floor(rests.number(redis.call("HGET", key, "max_concurrent_uses")) or 1), 1)
  if redis.call("ZCOUNT", leases, string.format("(%.0f", NOW), "+inf") >= cap then return 0 end
  -- tokens keep rising even where the clock of this life is behind that of the old one
  if lease.token > rests.last_token(FENCE) then rests.set_token(FENCE, lease.token) end
  redis.call("HSET", lease.key, "key_id", key_id, "pool", lease.pool, "fingerprint", lease.fingerprint,
    "fencing_token", string.format("%.0f", lease.token), "owner", OWNER, "app", lease.app,
    "expires_at_ms", string.format("%.0f", ENDS))
  if lease.group then
    redis.call("HSET", lease.key, "group", lease.group)
    redis.call("ZADD", lease.crowd, ENDS, id)
  end
  redis.call("PEXPIREAT", lease.key, ENDS)
  redis.call("ZADD", leases, ENDS, id)
  return ENDS
end

local argument = 10 + COUNT + GROUPS
for at = 1, LEASES do
  local id, index = ARGV[argument + 1], tonumber(ARGV[argument + 2])
  local lease = {
    key = KEYS[4 + COUNT * 2 + GROUPS + at],
    pool = ARGV[argument + 3],
    fingerprint = ARGV[argument + 4],
    token = tonumber(ARGV[argument + 5]),
    app = ARGV[argument + 6],
  }
  local group = tonumber(ARGV[argument + 7])
  if group > 0 then lease.group, lease.crowd = ARGV[10 + COUNT + group], KEYS[4 + COUNT * 2 + group] end
  argument = argument + 7
  local key_id, key, leases = ARGV[10 + index], KEYS[4 + index * 2 - 1], KEYS[4 + index * 2]
  local row = redis.call("HMGET", lease.key, "key_id", "pool", "owner", "revoked", "probe", "group")
  local answer = 0
  local own = row[1] == key_id and row[2] == lease.pool and row[3] == OWNER
  if not row[1] or (own and not row[4]) then
    local ends = rests.number(redis.call("ZSCORE", leases, id))
    if row[1] and ends and ends > NOW then
      answer = math.max(ends, ENDS)
      redis.call("HSET", lease.key, "expires_at_ms", string.format("%.0f", answer))
      redis.call("PEXPIREAT", lease.key, answer)
      redis.call("ZADD", leases, answer, id)
      if row[5] then redis.call("ZADD", PROBES, answer, id) end
      if row[6] and row[6] == lease.group then redis.call("ZADD", lease.crowd, answer, id) end
    elseif REASSERT then
      answer = re_create(lease, key, leases, id, key_id)
    end
  end
  answers[2 + at] = answer
end
return answers
