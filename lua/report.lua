--[[ report.lua: apply what an answer said of its key. Follows clock.lua and rests.lua.
  KEYS[1]  lessor:{p}:fence              string  last fencing token
  KEYS[2]  lessor:{p}:cooldowns          hash  subject -> rest
  KEYS[3]  lessor:{p}:key:<key>          hash  settings, status, own rests
  KEYS[4]  lessor:{p}:key:<key>:leases   zset  lease id -> ms at which it expires
  KEYS[5]  lessor:{p}:lease:<lease>      hash  what the lease was granted for
  ARGV     1 "success", "learn", "rest" or "nothing", 2 lease, 3 key, 4 fingerprint, 5 fencing token,
           6 channel for events, 7 this sidecar's name among those who wait, 8 provider, then
           for success: the scoped subjects of the request,
           for rest: the scoped subject it is about, or "" for the key's own; class, wait the provider named in ms
           or "", first and longest wait of the class in ms, then as "1" or "0": a probation follows, only a
           check ends it, it is doubted; status or "", code or ""
  Returns  now in ms, ms until which the subject cools or 0, the key's status for this fingerprint or "",
           1 if something was lifted that others may wait for
  Atomic   in one step. A report that contradicts its lease, or names a key that nobody serves, changes nothing
  Again    harmless: evidence that is known grows nothing
  Clock    Redis TIME ]]
local FENCE, COOLDOWNS, KEY, LEASES, LEASE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local WHAT, LEASE_ID, KEY_ID, FINGERPRINT = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local TOKEN, CHANNEL, SELF, PROVIDER = tonumber(ARGV[5]), ARGV[6], ARGV[7], ARGV[8]
local OWN = "rest:" .. FINGERPRINT

local granted = redis.call("HMGET", LEASE, "key_id", "fencing_token", "fingerprint")
local contradicted = granted[1]
  and (granted[1] ~= KEY_ID or tonumber(granted[2]) ~= TOKEN or granted[3] ~= FINGERPRINT)
if contradicted or redis.call("HEXISTS", KEY, "pool") == 0 then return { NOW, 0, "", 0 } end

local cooling, lifted = 0, 0

local function succeed()
  local token = rests.believed(FENCE, TOKEN)
  local own = rests.read(redis.call("HGET", KEY, OWN))
  if own and token > own.token then
    redis.call("HDEL", KEY, OWN)
    rests.show(KEY)
    lifted = 1
  end
  for at = 9, #ARGV do
    local rest = rests.read(redis.call("HGET", COOLDOWNS, ARGV[at]))
    if rest and token > rest.token then
      redis.call("HDEL", COOLDOWNS, ARGV[at])
      lifted = 1
    end
  end
end

-- One use less than were live when the provider said "too many"; of an ended lease it tells nothing.
local function learn()
  local ends = tonumber(redis.call("ZSCORE", LEASES, LEASE_ID))
  if not granted[1] or not ends or ends <= NOW then return end
  local live = redis.call("ZCOUNT", LEASES, string.format("(%.0f", NOW), "+inf")
  redis.call("HSET", KEY, "learned_cap", math.max(live - 1, 1), "learned_at_ms", string.format("%.0f", NOW))
end

local function refuse()
  local subject = ARGV[9]
  local evidence = {
    class = ARGV[10],
    said_ms = tonumber(ARGV[11]),
    first_ms = tonumber(ARGV[12]),
    most_ms = tonumber(ARGV[13]),
    probation = ARGV[14] == "1",
    forever = ARGV[15] == "1",
    doubt = ARGV[16] == "1",
    status = tonumber(ARGV[17]),
    code = ARGV[18] ~= "" and ARGV[18] or nil,
    lease = LEASE_ID,
    token = rests.believed(FENCE, TOKEN),
  }
  local stamp = rests.next_token(FENCE)
  local old, rest
  if subject == "" then
    old = rests.read(redis.call("HGET", KEY, OWN))
    rest = rests.after(old, evidence, stamp)
    rests.set_own(KEY, FINGERPRINT, rest)
  else
    old = rests.read(redis.call("HGET", COOLDOWNS, subject))
    rest = rests.after(old, evidence, stamp)
    rests.set_scoped(COOLDOWNS, subject, rest)
  end
  if rest.until_ms == rests.FOREVER then
    cooling = -1
  elseif rest.until_ms > NOW then
    cooling = rest.until_ms
  end
end

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
