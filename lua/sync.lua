--[[ sync.lua: write the settings of the keys one sidecar serves. Follows clock.lua and rests.lua.
  KEYS[1]  lessor:{p}:epoch              hash  the life of the data, its grace, the server's replication id
  KEYS[2]  lessor:{p}:fingerprints       hash  fingerprint -> the key that has it
  KEYS[3]  lessor:{p}:keys               zset  every key -> ms at which a sidecar last spoke of it
  then for each key:
           lessor:{p}:key:<key>          hash  settings, status, own rests
           lessor:{p}:pool:<pool>:keys   zset  the keys of the pool it comes into
           lessor:{p}:pool:<pool>:keys   zset  the keys of the pool it was in when the caller looked, or the same
  ARGV     1 id for a new epoch, 2 replication id or "", 3 "replace" or "repair", 4 channel for events, 5 this
           sidecar's name among those who wait, 6 provider, 7 number of keys,
           then for each key: id, pool, group or "", cap, fingerprint or "", pool it was in or ""
  Returns  now in ms, epoch id, 1 and per key what it had where that is other settings (pool, group or "", cap,
           fingerprint or ""), else 0, and the key that has the same secret or ""; or now, epoch id, 0 where a pool
           has changed since the caller looked: nothing was written, look again
  Atomic   in one step. Other keys are not touched; leases stay
  Clock    Redis TIME ]]
local EPOCH, FINGERPRINTS, INDEX = KEYS[1], KEYS[2], KEYS[3]
local FRESH_EPOCH, REPLICATION, REPLACE = ARGV[1], ARGV[2], ARGV[3] == "replace"
local CHANNEL, SELF, PROVIDER, COUNT = ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])

local epoch = redis.call("HGET", EPOCH, "id")
local answers = { NOW, epoch or FRESH_EPOCH, 1 }
local known = {}
for at = 1, COUNT do
  local key, argument = KEYS[1 + at * 3], 1 + at * 6
  known[at] = redis.call("HMGET", key, "pool", "group", "max_concurrent_uses", "fingerprint", "status")
  if (known[at][1] or "") ~= ARGV[argument + 6] then return { NOW, answers[2], 0 } end
end
if not epoch then redis.call("HSET", EPOCH, "id", FRESH_EPOCH) end
if REPLICATION ~= "" then redis.call("HSETNX", EPOCH, "replication_id", REPLICATION) end

local function set(key, field, value)
  if value ~= "" then
    redis.call("HSET", key, field, value)
  else
    redis.call("HDEL", key, field)
  end
end

for at = 1, COUNT do
  local key, pool, old_pool, argument = KEYS[1 + at * 3], KEYS[2 + at * 3], KEYS[3 + at * 3], 1 + at * 6
  local id, pool_name, group, cap, fingerprint =
    ARGV[argument + 1], ARGV[argument + 2], ARGV[argument + 3], ARGV[argument + 4], ARGV[argument + 5]
  local had = known[at]
  local fresh = not had[1]
  local differs = not fresh
    and (had[1] ~= pool_name or (had[2] or "") ~= group or had[3] ~= cap or (had[4] or "") ~= fingerprint)
  redis.call("HSET", key, "seen_at_ms", string.format("%.0f", NOW))
  redis.call("ZADD", INDEX, NOW, id)
  if old_pool ~= pool then redis.call("ZREM", old_pool, id) end
  redis.call("ZADD", pool, "NX", NOW, id)
  redis.call("HSET", key, "pool", pool_name)
  if fresh or (differs and REPLACE) then
    if had[4] and had[4] ~= fingerprint and redis.call("HGET", FINGERPRINTS, had[4]) == id then
      redis.call("HDEL", FINGERPRINTS, had[4])
    end
    redis.call("HSET", key, "max_concurrent_uses", cap)
    set(key, "group", group)
    set(key, "fingerprint", fingerprint)
  end
  local same = ""
  if fingerprint ~= "" then
    redis.call("HSETNX", FINGERPRINTS, fingerprint, id)
    same = redis.call("HGET", FINGERPRINTS, fingerprint)
    if same == id then same = "" end
  end
  rests.show(key)
  answers[#answers + 1] = differs and { had[1], had[2] or "", had[3] or "", had[4] or "" } or 0
  answers[#answers + 1] = same
end
redis.call("PUBLISH", CHANNEL, "changed " .. SELF .. " " .. PROVIDER)
return answers
