--[[ acquire.lua: take a slot for each of several requests, of the first candidate that has one free.
  Follows clock.lua and rests.lua.
  KEYS[1]  lessor:{p}:epoch              hash  the life of the data, and its grace
  KEYS[2]  lessor:{p}:fence              string  last fencing token
  KEYS[3]  lessor:{p}:cooldowns          hash  subject -> rest
  KEYS[4]  lessor:{p}:probes             zset  lease that probes -> ms at which it expires
  KEYS[5]  lessor:{p}:waiting            zset  sidecar where somebody waits -> ms until which it counts
  KEYS[6]  lessor:{p}:groups             hash  group -> the learned cap of all its keys
  then for each candidate:
           lessor:{p}:key:<key>          hash  settings, status, own rests
           lessor:{p}:key:<key>:leases   zset  lease id -> ms at which it expires
  then for each pool of a candidate:
           lessor:{p}:pool:<pool>:keys   zset  the pool's keys
  then for each group that a candidate is asked for in:
           lessor:{p}:group:<group>:leases  zset  lease id -> ms at which it expires
  then for each request:
           lessor:{p}:lease:<lease>      hash  what the lease was granted for
  ARGV     1 id for a new epoch, 2 this sidecar's name among those who wait, 3 ms that it counts as waiting,
           then the numbers of 4 candidates, 5 pools, 6 groups, 7 terms and 8 requests, 9 first of the deadlines,
           10 "1" where two requests have one lease id, then lists of numbers, each followed by a blank:
           11 each candidate's pool, or "" where all are in the first, 12 each candidate's group, 0 for none, or ""
           where none is in one, 13 the terms of each request, or "" where all are on the first, 14 the deadline of
           each in ms, 15 what each tries after its first candidate, in order, followed by a semicolon;
           16 each request's first candidate or 0, each number as the byte of that code, or "" where the first is
           the first's, the second the second's, and so on; 17 the number of candidates that a request tries first,
           which come before the others; 18 the candidates' `rest:<fingerprint>`, one right after the other;
           then for each pool its name, for each group its name,
           for each of the terms on which requests are made 4: owner, app, model or "", ttl in ms. A group that is
           `auto`, or begins so, is the caller's guess: what answers have named counts. Keys and leases are called
           as the names in KEYS end
  Returns  now in ms, epoch id, then for each request
           its token, where its first candidate was granted, neither of the flags below is set and no group is
           told; the lease expires after its ttl,
           {1, key, pool, token, expires_at_ms, probe, wants_success, group that answers have named or ""}, flags
           as 0 or 1,
           {0, first end of a cooldown or 0, first end of a lease or 0, end of the grace or 0 where that alone
           makes a candidate full, then per candidate a reason and a value:
           "member", "settings", "full", "cooling" and its end and class, or "unusable" and the status},
           {2} where it came after its deadline or its id is another's: nothing changed
  Atomic   each request whole, one after the other; a request that is refused changes nothing
  Again    a live lease of the same id and owner is answered as it was granted; no second slot is taken
  Cost     what requests share is sent, read and written once a call, and what seldom matters is sent as one
           argument, for each costs as much as a small command; so does a number that is made to text, or back
  Clock    Redis TIME; a deadline is the caller's estimate of it, and judged by the clock itself ]]
local KEYS, ARGV, call, tonumber = KEYS, ARGV, redis.call, tonumber -- a local name is found faster
local text_from, text_of, floor, max, unpack = string.sub, string.format, math.floor, math.max, unpack
local EPOCH, FENCE, COOLDOWNS, PROBES, WAITING, GROUPS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local FRESH_EPOCH, SELF, WAITS_MS = ARGV[1], ARGV[2], tonumber(ARGV[3])
local CANDIDATES, POOLS, GROUP_COUNT = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local TERMS, REQUESTS, DEADLINE = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local POOL_KEYS = 6 + CANDIDATES * 2
local GROUP_KEYS = POOL_KEYS + POOLS
local LEASE_KEYS = GROUP_KEYS + GROUP_COUNT
local POOL_ARGS = 18
local GROUP_ARGS = POOL_ARGS + POOLS
local TERM_ARGS = GROUP_ARGS + GROUP_COUNT
local FIRSTS = tonumber(ARGV[17])
local KEY_ID_AT, LEASE_ID_AT = #EPOCH - #"epoch" + #"key:" + 1, #EPOCH - #"epoch" + #"lease:" + 1
local REST, FINGERPRINT_AT = #"rest:" + 64, #"rest:" + 1 -- a field's name, and in it the fingerprint
local COOLING, FULL = "cooling", "full"
-- The text of a whole number. "%d" costs half as much as "%.0f", and is exact where Redis' own have 64 bits.
local WHOLE = text_of("%d", 1099511627776) == "1099511627776" and "%d" or "%.0f"
local NOW_TEXT, USED_BEFORE = text_of(WHOLE, NOW), text_of(WHOLE, NOW - rests.USED_EVERY)
local USED_SIZE = #NOW_TEXT == #USED_BEFORE and #NOW_TEXT
local LIVE = "(" .. NOW_TEXT

local function numbers(text)
  local list = {}
  for number in string.gmatch(text, "%d+") do list[#list + 1] = tonumber(number) end
  return list
end

local first_of = ARGV[16] ~= "" and { string.byte(ARGV[16], 1, -1) }
local pool_of = ARGV[11] ~= "" and numbers(ARGV[11])
local group_of = ARGV[12] ~= "" and numbers(ARGV[12])
local candidates, ids, members = {}, {}, {}
local slots = {} -- by leases' key: what this call knows, and adds, of a key's slots, whoever names the key
local granting = {} -- those of them, and of the groups, that it adds to
local groups = {}
for at = 1, GROUP_COUNT do groups[at] = { leases = KEYS[GROUP_KEYS + at] } end
if GROUP_COUNT > 0 then
  for at, text in ipairs(call("HMGET", GROUPS, unpack(ARGV, GROUP_ARGS + 1, GROUP_ARGS + GROUP_COUNT))) do
    groups[at].cap = rests.group_cap(text)
  end
end

local epoch = call("HMGET", EPOCH, "id", "grace_until_ms")
local grace_until = rests.number(epoch[2]) or 0
local in_grace = NOW < grace_until
local anything_rests = call("EXISTS", COOLDOWNS) == 1
local scoped = {} -- rests in the hash of cooldowns as this call has read and written them; false for none
local token, waits = nil, false

-- Of two rests, each its end and class, the one that ends last.
local function later(known, ends, class)
  if known and known[1] >= ends then return known end
  return { ends, class }
end

local function bears(candidate, model)
  local list, group = {}, candidate.group or ""
  if group ~= "" then list[#list + 1] = "group:" .. group end
  local of = model ~= "" and model or "-" -- requests whose model is not known
  list[#list + 1] = "key:" .. candidate.id .. "@" .. candidate.fingerprint .. "|" .. of
  if group ~= "" then list[#list + 1] = "group:" .. group .. "|" .. of end
  list[#list + 1] = model ~= "" and "provider|" .. model or "provider"
  return list
end

local caps = {} -- by their texts, for most are the same

local function cap_of(text)
  local cap = max(floor(rests.number(text) or 1), 1)
  caps[text] = cap
  return cap
end

-- What a candidate has that most have not.
local function look_closer(candidate, group, learned, rest)
  if group > 0 then
    candidate.group = ARGV[GROUP_ARGS + group]
    if candidate.group ~= "auto" then candidate.crowd = groups[group] end -- among whose uses its leases count
    if rests.learns_group(candidate.group) then
      candidate.learns = true
      local known = call("HGET", candidate.key, "group:" .. candidate.fingerprint) or ""
      if known ~= candidate.group then candidate.crowd = nil end -- told with the grant, and counted from the next on
      candidate.group = known
    end
  end
  if learned then
    candidate.configured = candidate.cap
    candidate.learned = rests.learned_cap(learned, call("HGET", candidate.key, "learned_at_ms")) or math.huge
    candidate.cap = math.min(candidate.learned, candidate.cap)
  end
  if rest then candidate.own = rests.read(rest) end
end

-- Those tried first, in one look where all have one pool: a score, or false. Not every server knows the command, nor
-- may every user call it; they, and other candidates, are asked one by one.
if FIRSTS > 0 and not pool_of then
  for index = 1, FIRSTS do ids[index] = text_from(KEYS[5 + index * 2], KEY_ID_AT) end
  local scores = redis.pcall("ZMSCORE", KEYS[POOL_KEYS + 1], unpack(ids))
  if not scores.err then members = scores end
end

-- Whether it is to be written anew that a key is used. Texts of one length lie as their numbers do.
local function is_due(used)
  if not used then return true end
  if #used == USED_SIZE then return used <= USED_BEFORE or used > NOW_TEXT end
  local at = rests.number(used)
  return not at or at <= NOW - rests.USED_EVERY or at > NOW
end

-- Reads a candidate, once a call; what this call grants is kept up to date. The first of a key that is read is
-- also what is known of the key's slots: `taken` are those in use, with what has expired and what this call grants,
-- and `added` what it adds.
local function look(index)
  local key, leases = KEYS[5 + index * 2], KEYS[6 + index * 2]
  local id, member = ids[index] or text_from(key, KEY_ID_AT), members[index]
  local pool, group = pool_of and pool_of[index] or 1, group_of and group_of[index] or 0
  local rest_field = text_from(ARGV[18], (index - 1) * REST + 1, index * REST)
  if member == nil then member = call("ZSCORE", KEYS[POOL_KEYS + pool], id) end
  local status, cap, learned, used, rest = unpack(call("HMGET", key, "status", "max_concurrent_uses", "learned_cap",
    "last_used_at_ms", rest_field))
  local slot = slots[leases]
  local candidate = {
    id = id,
    pool_name = ARGV[POOL_ARGS + pool],
    fingerprint = text_from(rest_field, FINGERPRINT_AT),
    key = key,
    leases = leases,
    cap = caps[cap] or cap_of(cap),
    is_due = is_due(used),
    slot = slot,
    taken = not slot and call("ZCARD", leases),
    is_plain = false, -- whether nothing bears on it but its cap, and what rests for several keys
  }
  candidates[index] = candidate
  if not slot then candidate.slot, slots[leases] = candidate, candidate end
  if not (cap or call("HEXISTS", key, "pool") == 1) then
    candidate.unfit = "settings"
  elseif not member then
    candidate.unfit = "member"
  elseif status == "disabled" then
    candidate.unfit = "disabled"
  end
  if group > 0 or learned or rest then
    look_closer(candidate, group, learned, rest)
  else
    candidate.is_plain = not candidate.unfit
  end
  return candidate
end

local function granted(slot) return slot.added and #slot.added / 2 or 0 end

-- Whether that many leases of a key live. What has expired is counted, and told apart only where it decides.
local function has_live(slot, cap)
  if slot.taken < cap then return false end
  if not slot.exact then
    local live = call("ZCOUNT", slot.leases, LIVE, "+inf") + granted(slot)
    slot.exact, slot.stale, slot.taken = true, live < slot.taken, live
  end
  return slot.taken >= cap
end

-- Of a key's slots, or of a group; 0 for none.
local function first_end(slot)
  if not slot.first then
    local first = call("ZRANGEBYSCORE", slot.leases, LIVE, "+inf", "WITHSCORES", "LIMIT", 0, 1)
    slot.first = rests.number(first[2]) or math.huge
  end
  local first = slot.first
  for at = 1, granted(slot) * 2, 2 do first = math.min(first, tonumber(slot.added[at])) end
  return first < math.huge and first or 0
end

-- Whether a group has in use what the provider allows it; counted only where that was learned.
local function is_crowded(crowd)
  if not crowd or not crowd.cap then return false end
  crowd.known = crowd.known or call("ZCOUNT", crowd.leases, LIVE, "+inf")
  return crowd.known + granted(crowd) >= crowd.cap
end

-- The end of a live probe; one that this call has granted is in PROBES already.
local function probe_end(rest)
  local ends = rest.probe_lease and rests.number(call("ZSCORE", PROBES, rest.probe_lease))
  if ends and ends > NOW then return ends end
end

-- Reads those of the subjects that this call has not come to before.
local function read_scoped(subjects)
  local fresh = {}
  for _, subject in ipairs(subjects) do
    if scoped[subject] == nil then fresh[#fresh + 1] = subject end
  end
  if #fresh == 0 then return end
  for at, text in ipairs(call("HMGET", COOLDOWNS, unpack(fresh))) do
    scoped[fresh[at]] = rests.read(text) or false
  end
end


-- What rests that bears on a request with this candidate: subject -> rest.
local function resting(candidate, model)
  local list = {}
  if candidate.own then list[1] = { rest = candidate.own, own = true } end
  if anything_rests then
    local subjects = candidate.bears and candidate.bears[model]
    if not subjects then
      subjects = bears(candidate, model)
      candidate.bears = candidate.bears or {}
      candidate.bears[model] = subjects
    end
    read_scoped(subjects)
    for _, subject in ipairs(subjects) do
      local rest = scoped[subject]
      if rest then list[#list + 1] = { rest = rest, subject = subject } end
    end
  end
  return list
end

local PLAIN = { wants_success = 0, probe = 0 } -- the pass of most

-- A key that is off or bad says so first, then one that cools, then one that is full: the later reasons are
-- the ones worth waiting for. Returns a pass, or nil, reason, value, the end of a lease and of the
-- grace.
local function weigh(candidate, model)
  if
    candidate.is_plain
    and not in_grace
    and candidate.slot.taken < candidate.cap
    and not (anything_rests and resting(candidate, model)[1])
  then
    return PLAIN
  end
  if candidate.unfit == "disabled" then return nil, "unusable", "disabled" end
  if candidate.unfit then return nil, candidate.unfit, "" end
  local pass = { list = resting(candidate, model), wants_success = 0, probe = 0 }
  local cap, cooling, cooling_if_full, out = candidate.cap, nil, nil, nil
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
  if in_grace then
    full_until = grace_until
  elseif out then
    full_until = out
  elseif has_live(candidate.slot, cap) then
    full_until = first_end(candidate.slot)
  elseif is_crowded(candidate.crowd) then
    full_until = first_end(candidate.crowd)
  else
    return pass
  end
  if cooling_if_full then return nil, COOLING, cooling_if_full end
  return nil, FULL, "", full_until, in_grace and grace_until or nil
end

-- Healed rests are forgotten; a probe is written into each rest that it probes.
local function touch(candidate, pass, lease, expires)
  for _, bearing in ipairs(pass.list) do
    local rest = bearing.rest
    local gone = rests.is_forgotten(rest)
    local probes = not gone and (rests.is_resting(rest) or rests.is_probation(rest))
    if probes then
      rest.probe_lease, rest.probed_at_ms = lease, NOW
      call("ZREMRANGEBYSCORE", PROBES, "-inf", NOW) -- whose holders have crashed
      call("ZADD", PROBES, expires, lease)
    end
    if bearing.own then
      if gone then
        call("HDEL", candidate.key, "rest:" .. candidate.fingerprint)
        candidate.own = nil
      elseif probes then
        call("HSET", candidate.key, "rest:" .. candidate.fingerprint, rests.text(rest))
      end
      rests.show(candidate.key)
    elseif gone then
      call("HDEL", COOLDOWNS, bearing.subject)
      scoped[bearing.subject] = false
    elseif probes then
      call("HSET", COOLDOWNS, bearing.subject, rests.text(rest))
    end
  end
end

-- Its leases are written at the end, with one command for all.
local function add(slot, lease, on)
  local added = slot.added
  if not added then
    granting[#granting + 1] = slot
    slot.added = { on.expires_text, lease }
  else
    local count = #added
    added[count + 1], added[count + 2] = on.expires_text, lease
  end
end

-- The last of what was added comes first: Redis looks for the place of each from a short list's start.
local function from_the_last(added)
  local list, count = {}, #added
  for at = 1, count, 2 do list[at], list[at + 1] = added[count - at], added[count - at + 1] end
  return list
end

-- What a grant has that most have not.
local function grant_more(candidate, pass, key, lease, on)
  if pass.probe == 1 then call("HSET", key, "probe", "1") end
  if pass.wants_success == 1 then call("HSET", key, "wants_success", "1") end
  if candidate.crowd then
    call("HSET", key, "group", candidate.group)
    add(candidate.crowd, lease, on)
  end
  touch(candidate, pass, lease, on.expires)
  if candidate.learned and candidate.learned >= candidate.configured then
    call("HDEL", candidate.key, "learned_cap", "learned_at_ms")
    candidate.learned = nil
  end
end

-- Returns the token, or all that the grant says, where that is more than what the request tries first.
local function grant(candidate, pass, key, on, is_first)
  token = token and token + 1 or max(rests.last_token(FENCE) + 1, NOW_US)
  local lease, token_text, slot = text_from(key, LEASE_ID_AT), text_of(WHOLE, token), candidate.slot
  -- The longest first: the hash's memory grows in fewer steps.
  call("HSET", key, "fingerprint", candidate.fingerprint, "owner", on.owner, "key_id", candidate.id,
    "pool", candidate.pool_name, "expires_at_ms", on.expires_text, "fencing_token", token_text, "app", on.app)
  call("PEXPIREAT", key, on.expires_text)
  slot.taken = slot.taken + 1
  add(slot, lease, on)
  if pass ~= PLAIN then grant_more(candidate, pass, key, lease, on) end
  if is_first and (pass == PLAIN or pass.probe == 0 and pass.wants_success == 0 and not candidate.learns) then
    return token
  end
  return {
    1, candidate.id, candidate.pool_name, token_text, on.expires, pass.probe, pass.wants_success,
    candidate.learns and candidate.group or "",
  }
end

local others -- of each request, what it tries after its first candidate

local function tried_after_first(request)
  if not others then
    others = {}
    for list in string.gmatch(ARGV[15], "([^;]*);") do others[#others + 1] = list end
  end
  return numbers(others[request])
end

-- The learned group that the holder of a lease of this key is told; "" where the caller names the group itself.
local function told(request, key, group)
  local order = tried_after_first(request)
  table.insert(order, 1, first_of and first_of[request] or request)
  for _, index in ipairs(order) do
    if index > 0 and text_from(KEYS[5 + index * 2], KEY_ID_AT) == key then
      local candidate = candidates[index] or look(index)
      if not candidate.learns then return "" end
      return group or call("HGET", candidate.key, "group:" .. candidate.fingerprint) or ""
    end
  end
  return ""
end

-- The grant that a repeated call had, or a refusal where the id is another's.
local function again(request, key, on)
  local known = call("HMGET", key, "key_id", "pool", "fencing_token", "expires_at_ms", "owner", "probe",
    "wants_success", "group")
  local expires = rests.number(known[4])
  if not known[1] or not expires or expires <= NOW then return nil end
  if known[5] ~= on.owner then return { 2 } end
  local group = told(request, known[1], known[8])
  return { 1, known[1], known[2], known[3], expires, tonumber(known[6]) or 0, tonumber(known[7]) or 0, group }
end

-- Why a candidate was not lent, added to a refusal.
local function refuse(refusal, reason, value, ends, grace)
  if refusal[4] == 0 then refusal[4] = grace or 0 end
  if reason == COOLING and (refusal[2] == 0 or value[1] < refusal[2]) then refusal[2] = value[1] end
  if reason == FULL then
    waits = true
    if ends > 0 and (refusal[3] == 0 or ends < refusal[3]) then refusal[3] = ends end
  end
  refusal[#refusal + 1] = reason
  refusal[#refusal + 1] = value
end

local function serve(request, key, on)
  local first = first_of and first_of[request] or request
  if first == 0 then return { 0, 0, 0, 0 } end
  local candidate = candidates[first] or look(first)
  local pass, reason, value, ends, grace = weigh(candidate, on.model)
  if pass then return grant(candidate, pass, key, on, true) end
  local refusal = { 0, 0, 0, 0 }
  refuse(refusal, reason, value, ends, grace)
  for _, index in ipairs(tried_after_first(request)) do
    candidate = candidates[index] or look(index)
    pass, reason, value, ends, grace = weigh(candidate, on.model)
    if pass then return grant(candidate, pass, key, on) end
    refuse(refusal, reason, value, ends, grace)
  end
  return refusal
end

local terms = {}
for at = 1, TERMS do
  local argument = TERM_ARGS + at * 4
  local expires = NOW + tonumber(ARGV[argument])
  terms[at] = {
    owner = ARGV[argument - 3],
    app = ARGV[argument - 2],
    model = ARGV[argument - 1],
    expires = expires,
    expires_text = text_of(WHOLE, expires),
  }
end

local answers = { NOW, epoch[1] or FRESH_EPOCH }
-- One look tells whether any of the leases is there already; one that comes twice in a call is, the second time.
local repeats = ARGV[10] == "1" or call("EXISTS", unpack(KEYS, LEASE_KEYS + 1, LEASE_KEYS + REQUESTS)) > 0
local deadlines = NOW > DEADLINE and numbers(ARGV[14])
local terms_of = ARGV[13] ~= "" and numbers(ARGV[13])
for at = 1, REQUESTS do
  local key, on, answer = KEYS[LEASE_KEYS + at], terms[terms_of and terms_of[at] or 1], nil
  if deadlines and NOW > deadlines[at] then
    answer = { 2 }
  elseif repeats then
    answer = again(at, key, on)
  end
  answers[2 + at] = answer or serve(at, key, on)
end

if not epoch[1] then call("HSET", EPOCH, "id", FRESH_EPOCH) end
if token then rests.set_token(FENCE, token) end
for nth = 1, #granting do
  local slot = granting[nth]
  if slot.stale then call("ZREMRANGEBYSCORE", slot.leases, "-inf", NOW) end
  call("ZADD", slot.leases, unpack(#slot.added > 2 and from_the_last(slot.added) or slot.added))
  if slot.is_due then call("HSET", slot.key, "last_used_at_ms", NOW_TEXT) end
end
if waits then
  call("ZREMRANGEBYSCORE", WAITING, "-inf", NOW) -- sidecars that have gone
  call("ZADD", WAITING, NOW + WAITS_MS, SELF)
  call("PEXPIRE", WAITING, WAITS_MS)
end
return answers
