--[[ acquire.lua: take a slot for each of several requests, of the first candidate that has one free.
  Follows clock.lua and rests.lua.
  KEYS[1]  lessor:{p}:epoch              hash  the life of the data, and its grace
  KEYS[2]  lessor:{p}:fence              string  last fencing token
  KEYS[3]  lessor:{p}:cooldowns          hash  subject -> rest
  KEYS[4]  lessor:{p}:probes             zset  lease that probes -> ms at which it expires
  KEYS[5]  lessor:{p}:waiting            zset  sidecar where somebody waits -> ms until which it counts
  KEYS[6]  lessor:{p}:groups             hash  group -> the learned cap of all its keys
  then for each candidate:
           lessor:{p}:pool:<pool>:keys   zset  the pool's keys
           lessor:{p}:key:<key>          hash  settings, status, own rests
           lessor:{p}:key:<key>:leases   zset  lease id -> ms at which it expires
  then for each group that a candidate is asked for in:
           lessor:{p}:group:<group>:leases  zset  lease id -> ms at which it expires
  then for each request:
           lessor:{p}:lease:<lease>      hash  what the lease was granted for
  ARGV     1 id for a new epoch, 2 this sidecar's name among those who wait, 3 ms that it counts as waiting,
           4 number of candidates, 5 number of groups, 6 number of requests,
           then for each candidate 5: key id, pool, group or "", fingerprint, index of its group or 0; a group
           that is `auto`, or begins so, is the caller's guess: what answers have named counts,
           then for each request: lease id, owner, app, model or "", ttl in ms, deadline in ms, n, and n indexes
           of candidates in the order to try
  Returns  now in ms, epoch id, then for each request
           {1, key, pool, token, expires_at_ms, probe, wants_success, group that answers have named or ""},
           flags as 0 or 1,
           {0, first end of a cooldown or 0, first end of a lease or 0, end of the grace or 0 where that alone
           makes a candidate full, then per candidate a reason and a value:
           "member", "settings", "full", "cooling" and its end and class, or "unusable" and the status},
           {2} where it came after its deadline or its id is another's: nothing changed
  Atomic   each request whole, one after the other; a request that is refused changes nothing
  Again    a live lease of the same id and owner is answered as it was granted; no second slot is taken
  Clock    Redis TIME; a deadline is the caller's estimate of it, and judged by the clock itself ]]
local EPOCH, FENCE, COOLDOWNS, PROBES, WAITING, GROUPS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local FRESH_EPOCH, SELF, WAITS_MS = ARGV[1], ARGV[2], tonumber(ARGV[3])
local CANDIDATES, GROUP_COUNT, REQUESTS = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local COOLING, FULL = "cooling", "full"
local LIVE = string.format("(%.0f", NOW)

local candidates = {}
local slots = {} -- by leases' key: what this call knows, and adds, of a key's slots, whoever names the key
local groups, names = {}, {}
for at = 1, GROUP_COUNT do groups[at] = { leases = KEYS[6 + CANDIDATES * 3 + at], added = {} } end
local argument = 6
for at = 1, CANDIDATES do
  local keys, group = 6 + (at - 1) * 3, tonumber(ARGV[argument + 5])
  candidates[at] = {
    id = ARGV[argument + 1],
    pool_name = ARGV[argument + 2],
    group = ARGV[argument + 3],
    fingerprint = ARGV[argument + 4],
    learns = rests.learns_group(ARGV[argument + 3]),
    crowd = groups[group], -- the group among whose uses its leases count
    pool = KEYS[keys + 1],
    key = KEYS[keys + 2],
    leases = KEYS[keys + 3],
    slot = slots[KEYS[keys + 3]] or { added = {} },
  }
  slots[KEYS[keys + 3]] = candidates[at].slot
  names[group] = ARGV[argument + 3]
  argument = argument + 5
end
if GROUP_COUNT > 0 then
  for at, text in ipairs(redis.call("HMGET", GROUPS, unpack(names))) do groups[at].cap = rests.group_cap(text) end
end

local epoch = redis.call("HMGET", EPOCH, "id", "grace_until_ms")
local grace_until = rests.number(epoch[2]) or 0
local anything_rests = redis.call("EXISTS", COOLDOWNS) == 1
local token, waits = nil, false

local function earlier(known, other)
  if not known or other < known then return other end
  return known
end

-- Of two rests, each its end and class, the one that ends last.
local function later(known, ends, class)
  if known and known[1] >= ends then return known end
  return { ends, class }
end

local function bears(candidate, model)
  local list = {}
  if candidate.group ~= "" then list[#list + 1] = "group:" .. candidate.group end
  local of = model ~= "" and model or "-" -- requests whose model is not known
  list[#list + 1] = "key:" .. candidate.id .. "@" .. candidate.fingerprint .. "|" .. of
  if candidate.group ~= "" then list[#list + 1] = "group:" .. candidate.group .. "|" .. of end
  list[#list + 1] = model ~= "" and "provider|" .. model or "provider"
  return list
end

-- Reads a candidate once a call; what this call grants is kept up to date.
local function look(candidate)
  if candidate.seen then return end
  candidate.seen = true
  candidate.member = redis.call("ZSCORE", candidate.pool, candidate.id)
  local known = redis.call("HMGET", candidate.key, "pool", "status", "max_concurrent_uses", "learned_cap",
    "learned_at_ms", "rest:" .. candidate.fingerprint)
  if candidate.learns then
    local group = redis.call("HGET", candidate.key, "group:" .. candidate.fingerprint) or ""
    if group ~= candidate.group then candidate.crowd = nil end -- told with the grant, and counted from the next on
    candidate.group = group
  end
  candidate.has_settings = known[1]
  candidate.disabled = known[2] == "disabled"
  candidate.cap = math.max(math.floor(rests.number(known[3]) or 1), 1)
  candidate.cap_in_force = candidate.cap
  if known[4] then
    local learned = rests.learned_cap(known[4], known[5]) or math.huge
    candidate.learned = learned
    candidate.cap_in_force = math.min(learned, candidate.cap)
  end
  candidate.own = rests.read(known[6])
  local slot = candidate.slot
  slot.key, slot.leases = candidate.key, candidate.leases
  slot.live = slot.live or redis.call("ZCOUNT", candidate.leases, LIVE, "+inf")
end

-- Of a key's slots, or of a group.
local function first_end(slot)
  local first = redis.call("ZRANGEBYSCORE", slot.leases, LIVE, "+inf", "WITHSCORES", "LIMIT", 0, 1)
  local known = rests.number(first[2])
  for at = 1, #slot.added, 2 do known = earlier(known, slot.added[at]) end
  return known
end

-- Whether a group has in use what the provider allows it; counted only where that was learned.
local function is_crowded(crowd)
  if not crowd or not crowd.cap then return false end
  crowd.live = crowd.live or redis.call("ZCOUNT", crowd.leases, LIVE, "+inf") + #crowd.added / 2
  return crowd.live >= crowd.cap
end

-- The end of a live probe; one that this call has granted is in PROBES already.
local function probe_end(rest)
  local ends = rest.probe_lease and rests.number(redis.call("ZSCORE", PROBES, rest.probe_lease))
  if ends and ends > NOW then return ends end
end

-- What rests that bears on a request with this candidate: subject -> rest.
local function resting(candidate, model)
  local list = {}
  if candidate.own then list[1] = { rest = candidate.own, own = true } end
  if anything_rests then
    local subjects = bears(candidate, model)
    for at, text in ipairs(redis.call("HMGET", COOLDOWNS, unpack(subjects))) do
      local rest = rests.read(text)
      if rest then list[#list + 1] = { rest = rest, subject = subjects[at] } end
    end
  end
  return list
end

-- A key that is off or bad says so first, then one that cools, then one that is full: the later reasons are
-- the ones worth waiting for. Returns a pass, or nil, reason, value, the end of a lease and of the
-- grace.
local function weigh(candidate, model)
  look(candidate)
  if not candidate.has_settings then return nil, "settings", "" end
  if not candidate.member then return nil, "member", "" end
  if candidate.disabled then return nil, "unusable", "disabled" end
  local pass = { list = resting(candidate, model), wants_success = 0, probe = 0 }
  local cap, cooling, cooling_if_full, out = candidate.cap_in_force, nil, nil, nil
  for _, bearing in ipairs(pass.list) do
    local rest = bearing.rest
    local probe_ends = probe_end(rest)
    local gate, ends, class = rests.gate(rest, probe_ends ~= nil, model ~= "")
    if gate == "invalid" then return nil, "unusable", "invalid" end
    if gate == COOLING then
      cooling = later(cooling, ends, class)
    elseif gate == "out" then
      out = probe_ends
    elseif gate == "probe" or gate == "early" then
      pass.probe = 1
      if gate == "early" then cooling_if_full = later(cooling_if_full, ends, class) end
      if bearing.own then cap = 1 end
    end
    if not rests.is_forgotten(rest) and rests.is_proved_by(rest, model ~= "") then pass.wants_success = 1 end
  end
  if cooling then return nil, COOLING, cooling end
  local full_until
  if NOW < grace_until then
    full_until = grace_until
  elseif out then
    full_until = out
  elseif candidate.slot.live >= cap then
    full_until = first_end(candidate.slot) or 0
  elseif is_crowded(candidate.crowd) then
    full_until = first_end(candidate.crowd) or 0
  else
    return pass
  end
  if cooling_if_full then return nil, COOLING, cooling_if_full end
  return nil, FULL, "", full_until, NOW < grace_until and grace_until or nil
end

-- Healed rests are forgotten; a probe is written into each rest that it probes.
local function touch(candidate, pass, lease, expires)
  for _, bearing in ipairs(pass.list) do
    local rest = bearing.rest
    local gone = rests.is_forgotten(rest)
    local probes = not gone and (rests.is_resting(rest) or rests.is_probation(rest))
    if probes then
      rest.probe_lease, rest.probed_at_ms = lease, NOW
      redis.call("ZREMRANGEBYSCORE", PROBES, "-inf", NOW) -- whose holders have crashed
      redis.call("ZADD", PROBES, expires, lease)
    end
    if bearing.own then
      local field = "rest:" .. candidate.fingerprint
      if gone then
        redis.call("HDEL", candidate.key, field)
        candidate.own = nil
      elseif probes then
        redis.call("HSET", candidate.key, field, rests.text(rest))
      end
      rests.show(candidate.key)
    elseif gone then
      redis.call("HDEL", COOLDOWNS, bearing.subject)
    elseif probes then
      redis.call("HSET", COOLDOWNS, bearing.subject, rests.text(rest))
    end
  end
end

local function grant(candidate, pass, request)
  token = math.max((token or rests.last_token(FENCE)) + 1, NOW_US)
  local expires = NOW + request.ttl
  local row = {
    "key_id", candidate.id, "pool", candidate.pool_name, "fingerprint", candidate.fingerprint,
    "fencing_token", string.format("%.0f", token), "owner", request.owner, "app", request.app,
    "expires_at_ms", string.format("%.0f", expires),
  }
  if pass.probe == 1 then row[#row + 1] = "probe"; row[#row + 1] = "1" end
  if pass.wants_success == 1 then row[#row + 1] = "wants_success"; row[#row + 1] = "1" end
  local crowd = candidate.crowd
  if crowd then
    row[#row + 1] = "group"
    row[#row + 1] = candidate.group
    crowd.added[#crowd.added + 1] = expires
    crowd.added[#crowd.added + 1] = request.lease
    if crowd.live then crowd.live = crowd.live + 1 end
  end
  redis.call("HSET", request.key, unpack(row))
  redis.call("PEXPIREAT", request.key, expires)
  if #pass.list > 0 then touch(candidate, pass, request.lease, expires) end
  if candidate.learned and candidate.learned >= candidate.cap then
    redis.call("HDEL", candidate.key, "learned_cap", "learned_at_ms")
    candidate.learned = nil
  end
  local slot = candidate.slot -- its leases are written at the end, with one command
  slot.added[#slot.added + 1] = expires
  slot.added[#slot.added + 1] = request.lease
  slot.live = slot.live + 1
  return {
    1, candidate.id, candidate.pool_name, string.format("%.0f", token), expires, pass.probe, pass.wants_success,
    candidate.learns and candidate.group or "",
  }
end

-- The learned group that the holder of a lease of this key is told; "" where the caller names the group itself.
local function told(request, key, group)
  for _, index in ipairs(request.order) do
    local candidate = candidates[index]
    if candidate.id == key then
      if not candidate.learns then return "" end
      return group or redis.call("HGET", candidate.key, "group:" .. candidate.fingerprint) or ""
    end
  end
  return ""
end

-- The grant that a repeated call had, or a refusal where the id is another's.
local function again(request)
  local known = redis.call("HMGET", request.key, "key_id", "pool", "fencing_token", "expires_at_ms", "owner",
    "probe", "wants_success", "group")
  local expires = rests.number(known[4])
  if not known[1] or not expires or expires <= NOW then return nil end
  if known[5] ~= request.owner then return { 2 } end
  local group = told(request, known[1], known[8])
  return { 1, known[1], known[2], known[3], expires, tonumber(known[6]) or 0, tonumber(known[7]) or 0, group }
end

local function serve(request)
  if NOW > request.deadline then return { 2 } end
  local known = again(request)
  if known then return known end
  local refusal, cooldown_end, lease_end, grace_end = { 0, 0, 0, 0 }, nil, nil, nil
  for _, index in ipairs(request.order) do
    local candidate = candidates[index]
    local pass, reason, value, ends, grace = weigh(candidate, request.model)
    if pass then return grant(candidate, pass, request) end
    grace_end = grace_end or grace
    if reason == COOLING then cooldown_end = earlier(cooldown_end, value[1]) end
    if reason == FULL then
      waits = true
      if ends and ends > 0 then lease_end = earlier(lease_end, ends) end
    end
    refusal[#refusal + 1] = reason
    refusal[#refusal + 1] = value
  end
  refusal[2], refusal[3], refusal[4] = cooldown_end or 0, lease_end or 0, grace_end or 0
  return refusal
end

local answers = { NOW, epoch[1] or FRESH_EPOCH }
for at = 1, REQUESTS do
  local request = {
    key = KEYS[6 + CANDIDATES * 3 + GROUP_COUNT + at],
    lease = ARGV[argument + 1],
    owner = ARGV[argument + 2],
    app = ARGV[argument + 3],
    model = ARGV[argument + 4],
    ttl = tonumber(ARGV[argument + 5]),
    deadline = tonumber(ARGV[argument + 6]),
    order = {},
  }
  local count = tonumber(ARGV[argument + 7])
  for nth = 1, count do request.order[nth] = tonumber(ARGV[argument + 7 + nth]) end
  argument = argument + 7 + count
  answers[2 + at] = serve(request)
end

if not epoch[1] then redis.call("HSET", EPOCH, "id", FRESH_EPOCH) end
if token then rests.set_token(FENCE, token) end
for _, slot in pairs(slots) do
  if #slot.added > 0 then
    if redis.call("ZCARD", slot.leases) > slot.live - #slot.added / 2 then
      redis.call("ZREMRANGEBYSCORE", slot.leases, "-inf", NOW)
    end
    redis.call("ZADD", slot.leases, unpack(slot.added))
    redis.call("HSET", slot.key, "last_used_at_ms", string.format("%.0f", NOW))
  end
end
for _, crowd in ipairs(groups) do
  if #crowd.added > 0 then redis.call("ZADD", crowd.leases, unpack(crowd.added)) end
end
if waits then
  redis.call("ZREMRANGEBYSCORE", WAITING, "-inf", NOW) -- sidecars that have gone
  redis.call("ZADD", WAITING, NOW + WAITS_MS, SELF)
  redis.call("PEXPIRE", WAITING, WAITS_MS)
end
return answers
