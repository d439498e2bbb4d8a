--[[ release.lua: give back the slots of some leases, and no others. Follows clock.lua.
  KEYS[1]  lessor:{p}:probes             zset  lease that probes -> ms at which it expires
  KEYS[2]  lessor:{p}:waiting            zset  sidecar where somebody waits -> ms until which it counts
  KEYS[3]  lessor:{p}:groups             hash  group -> the learned cap of all its keys
  then for each lease:
           lessor:{p}:key:<key>:leases   zset  lease id -> ms at which it expires
           lessor:{p}:lease:<lease>      hash  what the lease was granted for
  then for each group of which a lease is named:
           lessor:{p}:group:<group>:leases  zset  lease id -> ms at which it expires
  ARGV     1 channel for events, 2 this sidecar's name among those who wait, 3 provider, 4 number of leases,
           then for each lease: id, key id, pool, index of its group or 0; then for each group its name
  Returns  now in ms, the number of slots that this call freed (what did not match, came late or a second time
           frees none), 1 if others than this key's waiters may wait for it: a probe ended, or a use of a group
           whose keys together may have so many and no more
  Atomic   look and removal are one step, so no slot is freed twice; a mismatch writes nothing
  Memory   deletes only, so that it works where Redis has no memory left
  Wakes    other sidecars, with one message a call, and only where somebody waits there
  Clock    Redis TIME, to count as freed only what was live ]]
local PROBES, WAITING, GROUPS = KEYS[1], KEYS[2], KEYS[3]
local CHANNEL, SELF, PROVIDER, LEASES = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local freed, wakes_all = {}, false
for at = 1, LEASES do
  local lease, key, pool, group = ARGV[1 + at * 4], ARGV[2 + at * 4], ARGV[3 + at * 4], tonumber(ARGV[4 + at * 4])
  local leases, row = KEYS[2 + at * 2], KEYS[3 + at * 2]
  local granted = redis.call("HMGET", row, "key_id", "pool", "probe")
  if granted[1] == key and granted[2] == pool then
    local ends = tonumber(redis.call("ZSCORE", leases, lease))
    redis.call("DEL", row)
    redis.call("ZREM", leases, lease)
    if group > 0 then
      local counted = redis.call("ZREM", KEYS[3 + LEASES * 2 + group], lease) == 1
      if counted and redis.call("HEXISTS", GROUPS, ARGV[4 + LEASES * 4 + group]) == 1 then wakes_all = true end
    end
    if granted[3] then
      redis.call("ZREM", PROBES, lease)
      wakes_all = true
    end
    if ends and ends > NOW then freed[#freed + 1] = key end
  end
end

if #freed > 0 or wakes_all then
  for _, waiter in ipairs(redis.call("ZRANGEBYSCORE", WAITING, string.format("(%.0f", NOW), "+inf", "LIMIT", 0, 2)) do
    if waiter ~= SELF then
      local what = wakes_all and "changed" or "freed"
      redis.call("PUBLISH", CHANNEL, what .. " " .. SELF .. " " .. PROVIDER .. " " .. table.concat(freed, " "))
      break
    end
  end
end
return { NOW, #freed, wakes_all and 1 or 0 }
