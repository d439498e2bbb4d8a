--[[ release.lua: give back the slots of some leases, and no others. Follows clock.lua.
  KEYS[1]  lessor:{p}:probes             zset  lease that probes -> ms at which it expires
  KEYS[2]  lessor:{p}:waiting            zset  sidecar where somebody waits -> ms until which it counts
  then for each lease:
           lessor:{p}:key:<key>:leases   zset  lease id -> ms at which it expires
           lessor:{p}:lease:<lease>      hash  what the lease was granted for
  ARGV     1 channel for events, 2 this sidecar's name among those who wait, 3 provider, 4 number of leases,
           then for each lease: id, key id, pool
  Returns  now in ms, the number of slots that this call freed (what did not match, came late or a second time
           frees none), 1 if a probe ended, for which others than this key's waiters may wait
  Atomic   look and removal are one step, so no slot is freed twice; a mismatch writes nothing
  Memory   deletes only, so that it works where Redis has no memory left
  Wakes    other sidecars, with one message a call, and only where somebody waits there
  Clock    Redis TIME, to count as freed only what was live ]]
local PROBES, WAITING = KEYS[1], KEYS[2]
local CHANNEL, SELF, PROVIDER, LEASES = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local freed, probe_ended = {}, false
for at = 1, LEASES do
  local lease, key, pool = ARGV[2 + at * 3], ARGV[3 + at * 3], ARGV[4 + at * 3]
  local leases, row = KEYS[1 + at * 2], KEYS[2 + at * 2]
  local granted = redis.call("HMGET", row, "key_id", "pool", "probe")
  if granted[1] == key and granted[2] == pool then
    local ends = tonumber(redis.call("ZSCORE", leases, lease))
    redis.call("DEL", row)
    redis.call("ZREM", leases, lease)
    if granted[3] then
      redis.call("ZREM", PROBES, lease)
      probe_ended = true
    end
    if ends and ends > NOW then freed[#freed + 1] = key end
  end
end

if #freed > 0 or probe_ended then
  for _, waiter in ipairs(redis.call("ZRANGEBYSCORE", WAITING, string.format("(%.0f", NOW), "+inf", "LIMIT", 0, 2)) do
    if waiter ~= SELF then
      local what = probe_ended and "changed" or "freed"
      redis.call("PUBLISH", CHANNEL, what .. " " .. SELF .. " " .. PROVIDER .. " " .. table.concat(freed, " "))
      break
    end
  end
end
return { NOW, #freed, probe_ended and 1 or 0 }
