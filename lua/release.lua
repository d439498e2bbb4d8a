--[[ release.lua: give back the slots of some leases, and no others. Follows clock.lua.
  KEYS[1]  lessor:{p}:probes             zset  lease that probes -> ms at which it expires
  KEYS[2]  lessor:{p}:waiting            zset  sidecar where somebody waits -> ms until which it counts
  KEYS[3]  lessor:{p}:groups             hash  group -> the learned cap of all its keys
  then for each key, and pool and group in which leases are named:
           lessor:{p}:key:<key>:leases   zset  lease id -> ms at which it expires
           and for each of these leases:
           lessor:{p}:lease:<lease>      hash  what the lease was granted for
  then for each group of which a lease is named:
           lessor:{p}:group:<group>:leases  zset  lease id -> ms at which it expires
  ARGV     1 channel for events, 2 this sidecar's name among those who wait, 3 provider, then the numbers of
           4 pools with groups and 5 groups, then for each pool with a group 3: pool, number of the group or 0,
           number of its keys; for each key the number of its leases, none of these where each has one; for each
           group its name. Keys and leases are called as the names in KEYS end
  Returns  now in ms, the number of slots that this call freed (what did not match, came late or a second time
           frees none), 1 if others than this key's waiters may wait for it: a probe ended, or a use of a group
           whose keys together may have so many and no more
  Atomic   look and removal are one step, so no slot is freed twice; a mismatch writes nothing
  Errors   of one lease, or of one key's, stop none of the others; the first is the answer
  Memory   deletes only, so that it works where Redis has no memory left
  Wakes    other sidecars, with one message a call, and only where somebody waits there
  Clock    Redis TIME, to count as freed only what was live ]]
local KEYS, ARGV, try, tonumber, text_from = KEYS, ARGV, redis.pcall, tonumber, string.sub -- a local name is found faster
local PROBES, WAITING, GROUPS = KEYS[1], KEYS[2], KEYS[3]
local CHANNEL, SELF, PROVIDER = ARGV[1], ARGV[2], ARGV[3]
local POOLS, CROWDS = tonumber(ARGV[4]), tonumber(ARGV[5])
local CROWD_KEYS, CROWD_ARGS = #KEYS - CROWDS, #ARGV - CROWDS
local KEY_ID_AT, LEASE_ID_AT = #PROBES - #"probes" + #"key:" + 1, #PROBES - #"probes" + #"lease:" + 1
local IS_COUNTED = #ARGV > 5 + POOLS * 3 + CROWDS
local KEY_ID_END = -#":leases" - 1
local NOW_TEXT = string.format("%.0f", NOW)
local NOW_SIZE = #NOW_TEXT

local failed
local function call(...)
  local answer = try(...)
  if type(answer) ~= "table" or not answer.err then return answer end
  failed = failed or answer
end

-- Whether that is later than now. Texts of one length lie as their numbers do.
local function is_later(ends)
  if ends and #ends == NOW_SIZE then return ends > NOW_TEXT end
  return (tonumber(ends) or 0) > NOW
end

local any_probes = call("EXISTS", PROBES) ~= 0
local rows, probes, freed, wakes_all = {}, {}, {}, false
local found, lived = 0, 0 -- how many rows, and of freed slots

local function free(leases)
  lived = lived + 1
  freed[lived] = leases
end

-- Removes a key's leases, of which so many live, and those among the uses of their group.
local function remove(leases, live, crowd, ids)
  for _ = 1, math.min(call("ZREM", leases, unpack(ids)) or 0, live) do free(leases) end
  if crowd == 0 then return end
  local counted = call("ZREM", KEYS[CROWD_KEYS + crowd], unpack(ids)) or 0
  if counted > 0 and call("HEXISTS", GROUPS, ARGV[CROWD_ARGS + crowd]) == 1 then wakes_all = true end
end

-- Gives back so many leases of a key, which follow it in KEYS: those that match are gathered, so that one command
-- removes what lies together.
local function give_back(at, count, pool, crowd)
  local leases, ids, matching, live = KEYS[at], {}, 0, 0
  local key = text_from(leases, KEY_ID_AT, KEY_ID_END)
  for row_at = at + 1, at + count do
    local row = KEYS[row_at]
    local granted
    if any_probes then
      granted = try("HMGET", row, "key_id", "pool", "expires_at_ms", "probe")
    else
      granted = try("HMGET", row, "key_id", "pool", "expires_at_ms")
    end
    if granted[1] == key and granted[2] == pool then
      local id = text_from(row, LEASE_ID_AT)
      found, matching = found + 1, matching + 1
      rows[found], ids[matching] = row, id
      if is_later(granted[3]) then live = live + 1 end
      if granted[4] then probes[#probes + 1] = id end
    elseif granted.err then
      failed = failed or granted
    end
  end
  if matching > 0 then remove(leases, live, crowd, ids) end
end

-- Of most keys a call names one lease. What the key's own list holds is the key's, so such a row is not asked whose
-- it is; where that tells nothing, it is.
local at, count_at = 4, 6 + POOLS * 3
for nth = 1, POOLS do
  local argument = 5 + nth * 3
  local pool, crowd, keys = ARGV[argument - 2], tonumber(ARGV[argument - 1]), tonumber(ARGV[argument])
  local is_plain = crowd == 0 and not any_probes
  for _ = 1, keys do
    local count = IS_COUNTED and tonumber(ARGV[count_at]) or 1
    local leases, row, is_done = KEYS[at], KEYS[at + 1], false
    if count == 1 and is_plain then
      local granted = try("HMGET", row, "pool", "expires_at_ms")
      is_done = granted[1] == pool and try("ZREM", leases, text_from(row, LEASE_ID_AT)) == 1
      if is_done then
        found = found + 1
        rows[found] = row
        if is_later(granted[2]) then free(leases) end
      end
    end
    if not is_done then give_back(at, count, pool, crowd) end
    at, count_at = at + count + 1, count_at + 1
  end
end
if found > 0 then call("DEL", unpack(rows)) end
if #probes > 0 then
  call("ZREM", PROBES, unpack(probes))
  wakes_all = true
end

if lived > 0 or wakes_all then
  local waiters = call("ZRANGEBYSCORE", WAITING, "(" .. NOW_TEXT, "+inf", "LIMIT", 0, 2) or {}
  for _, waiter in ipairs(waiters) do
    if waiter ~= SELF then
      local what = { wakes_all and "changed" or "freed", SELF, PROVIDER }
      for nth = 1, lived do what[3 + nth] = text_from(freed[nth], KEY_ID_AT, KEY_ID_END) end
      call("PUBLISH", CHANNEL, table.concat(what, " "))
      break
    end
  end
end
if failed then return failed end
return { NOW, lived, wakes_all and 1 or 0 }
