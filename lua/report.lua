--[[ report.lua: apply what an answer said of its key. Follows clock.lua, rests.lua and
  evidence.lua.
  KEYS[1]  lessor:{p}:fence              string  last fencing token
  KEYS[2]  lessor:{p}:cooldowns          hash  subject -> rest
  KEYS[3]  lessor:{p}:key:<key>          hash  settings, status, own rests
  KEYS[4]  lessor:{p}:key:<key>:leases   zset  lease id -> ms at which it expires
  KEYS[5]  lessor:{p}:lease:<lease>      hash  what the lease was granted for
  KEYS[6]  lessor:{p}:groups             hash  group -> the learned cap of all its keys
  KEYS[7]  lessor:{p}:group:<group>:leases  zset  lease id -> ms at which it expires; KEYS[4] again for no group
  KEYS[8]  lessor:{p}:cleared            hash  what a person cleared -> the newest token as of then
  ARGV     1 "success", "learn", "rest" or "nothing", 2 lease, 3 key, 4 fingerprint, 5 fencing token,
           6 channel for events, 7 this sidecar's name among those who wait, 8 provider, 9 group that the answer
           named, for a key whose group answers say, or "", 10 "1" where the request named a model or "0", then
           for success: the scoped subjects of the request,
           for learn: the group whose limit it is or "", and how many uses the answer says are allowed or "",
           for rest: the scoped subject it is about, or "" for the key's own; class, wait the provider named in ms
           or "", first and longest wait of the class in ms, then as "1" or "0": a probation follows, only a
           check ends it, it is doubted; status or "", code or "", what a person may have cleared (`key:<key>` or
           `group:<group>`) or ""
  Returns  now in ms, ms until which the subject cools or 0, the key's status for this fingerprint or "",
           1 if something was lifted that others may wait for
  Atomic   in one step. A report that contradicts its lease, or names a key that nobody serves, changes nothing;
           nor does a refusal by a lease from before a person cleared what it is about
  Again    harmless: evidence that is known grows nothing
  Clock    Redis TIME ]]
local FENCE, COOLDOWNS, KEY, LEASES, LEASE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local GROUPS, CROWD, CLEARED = KEYS[6], KEYS[7], KEYS[8]
local WHAT, LEASE_ID, KEY_ID, FINGERPRINT = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local TOKEN, CHANNEL, SELF, PROVIDER, NAMED = tonumber(ARGV[5]), ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local WITH_MODEL = ARGV[10] == "1"
local OWN = "rest:" .. FINGERPRINT

local granted = redis.call("HMGET", LEASE, "key_id", "fencing_token", "fingerprint", "group")
local contradicted = granted[1]
  and (granted[1] ~= KEY_ID or tonumber(granted[2]) ~= TOKEN or granted[3] ~= FINGERPRINT)
if contradicted or redis.call("HEXISTS", KEY, "pool") == 0 then return { NOW, 0, "", 0 } end

local cooling, lifted = 0, 0

local function lifts(rest, token)
  return rest and token > rest.token and rests.is_proved_by(rest, WITH_MODEL)
end

local function is_from_before(cleared)
  local since = cleared ~= "" and rests.number(redis.call("HGET", CLEARED, cleared))
  return since and rests.believed(FENCE, TOKEN) <= since
end

local function succeed()
  local token = rests.believed(FENCE, TOKEN)
  if lifts(rests.read(redis.call("HGET", KEY, OWN)), token) then
    redis.call("HDEL", KEY, OWN)
    rests.show(KEY)
    lifted = 1
  end
  for at = 11, #ARGV do
    if lifts(rests.read(redis.call("HGET", COOLDOWNS, ARGV[at])), token) then
      redis.call("HDEL", COOLDOWNS, ARGV[at])
      lifted = 1
    end
  end
end

-- Remembers the group that an answer named, for this secret; of too many secrets the first goes that is neither
-- this one nor the present one.
local function learn_group()
  local field = "group:" .. FINGERPRINT
  if NAMED == "" or redis.call("HGET", KEY, field) == NAMED then return end
  redis.call("HSET", KEY, field, NAMED)
  local current, known, spare = redis.call("HGET", KEY, "fingerprint"), 0, nil
  for _, other in ipairs(redis.call("HKEYS", KEY)) do
    if string.sub(other, 1, 6) == "group:" then
      known = known + 1
      local may_go = other ~= field and other ~= "group:" .. (current or "")
      if may_go and (not spare or other < spare) then spare = other end
    end
  end
  if known > rests.FINGERPRINTS and spare then redis.call("HDEL", KEY, spare) end
end

-- One use less than were live when the provider said "too many", and no more than it says it allows or than was
-- known.
local function lowered(leases, known)
  local live = redis.call("ZCOUNT", leases, string.format("(%.0f", NOW), "+inf")
  return math.max(math.min(live - 1, rests.number(ARGV[12]) or math.huge, known or math.huge), 1)
end

local function set_group_cap(group, cap)
  if redis.call("HEXISTS", GROUPS, group) == 0 and redis.call("HLEN", GROUPS) >= rests.GROUP_CAPS then
    local all, oldest, oldest_since = redis.call("HGETALL", GROUPS), nil, nil
    for at = 1, #all, 2 do
      local row = rests.group_row(all[at + 1])
      local since = row and rests.number(row.since_ms) or 0
      if not oldest or since < oldest_since or (since == oldest_since and all[at] < oldest) then
        oldest, oldest_since = all[at], since
      end
    end
    redis.call("HDEL", GROUPS, oldest)
  end
  redis.call("HSET", GROUPS, group, cjson.encode({ cap = cap, since_ms = NOW }))
end

-- Of a lease that has ended it tells nothing: how many lived with it is gone.
local function learn()
  local ends = tonumber(redis.call("ZSCORE", LEASES, LEASE_ID))
  if not granted[1] or not ends or ends <= NOW then return end
  local group = ARGV[11]
  if group ~= "" and granted[4] == group then
    if is_from_before("group:" .. group) then return end
    set_group_cap(group, lowered(CROWD, rests.group_cap(redis.call("HGET", GROUPS, group))))
    return
  end
  if is_from_before("key:" .. KEY_ID) then return end
  local known = redis.call("HMGET", KEY, "learned_cap", "learned_at_ms")
  local cap = lowered(LEASES, rests.learned_cap(known[1], known[2]))
  redis.call("HSET", KEY, "learned_cap", cap, "learned_at_ms", string.format("%.0f", NOW))
end

local function refuse()
  local subject = ARGV[11]
  local evidence = {
    class = ARGV[12],
    said_ms = tonumber(ARGV[13]),
    first_ms = tonumber(ARGV[14]),
    most_ms = tonumber(ARGV[15]),
    probation = ARGV[16] == "1",
    forever = ARGV[17] == "1",
    doubt = ARGV[18] == "1",
    status = tonumber(ARGV[19]),
    code = ARGV[20] ~= "" and ARGV[20] or nil,
    lease = LEASE_ID,
    token = rests.believed(FENCE, TOKEN),
    of_model = WITH_MODEL,
  }
  if is_from_before(ARGV[21]) then return end
  local stamp = rests.next_token(FENCE)
  local old, rest
  if subject == "" then
    old = rests.read(redis.call("HGET", KEY, OWN))
    rest = rests.after(old, evidence, stamp)
    rests.set_own(KEY, FINGERPRINT, rest)
  else
    old = rests.read(redis.call("HGET", COOLDOWNS, subject))
    rest = rests.after(old, evidence, stamp)
    if not rests.set_scoped(COOLDOWNS, subject, rest) then return end
  end
  if rest.until_ms == rests.FOREVER then
    cooling = -1
  elseif rest.until_ms > NOW then
    cooling = rest.until_ms
  end
end

learn_group()
if WHAT == "success" then
  succeed()
elseif WHAT == "learn" then
  learn()
elseif WHAT == "rest" then
  refuse()
end
if lifted == 1 then redis.call("PUBLISH", CHANNEL, "changed " .. SELF .. " " .. PROVIDER) end
local disabled = redis.call("HGET", KEY, "status") == "disabled"
return { NOW, cooling, rests.status(disabled, FINGERPRINT, rests.read(redis.call("HGET", KEY, OWN))), lifted }
