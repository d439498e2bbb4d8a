--[[ status.lua: apply a person's, or a check's, word on a key. Follows clock.lua, rests.lua and
  evidence.lua.
  KEYS[1]  lessor:{p}:fence              string  last fencing token
  KEYS[2]  lessor:{p}:cooldowns          hash  subject -> rest
  KEYS[3]  lessor:{p}:key:<key>          hash  settings, status, own rests
  KEYS[4]  lessor:{p}:groups             hash  group -> the learned cap of all its keys
  KEYS[5]  lessor:{p}:cleared            hash  what a person cleared -> the newest token as of then
  ARGV     1 "disable", "drain", "enable", "clear", "good", "doubted" or "bad", 2 key, 3 fingerprint, for good,
           doubted and bad, 4 channel for events, 5 this sidecar's name among those who wait, 6 provider, 7 class of a
           failed check, 8 its status or "", 9 its code or "", 10 ms for which a doubted key rests
  Returns  now in ms, 1, or 0 where nobody serves such a key
  Atomic   in one step. `clear` also lifts the rests of the key's group, and the learned caps of both, for good:
           leases from before add nothing to them; it lifts nothing invalid
  Again    harmless
  Clock    Redis TIME ]]
local FENCE, COOLDOWNS, KEY, GROUPS, CLEARED = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local WORD, KEY_ID, FINGERPRINT = ARGV[1], ARGV[2], ARGV[3]
local CHANNEL, SELF, PROVIDER, CLASS, DOUBTED_MS = ARGV[4], ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[10])

if redis.call("HEXISTS", KEY, "pool") == 0 then return { NOW, 0 } end

-- Forgets rests of the key, with any secret or with one, that `lifted` names.
local function lift_own(fingerprint, lifted)
  for _, field in ipairs(redis.call("HKEYS", KEY)) do
    local secret = string.match(field, "^rest:(.*)$")
    if secret and (not fingerprint or secret == fingerprint) then
      local rest = rests.read(redis.call("HGET", KEY, field))
      if not rest or lifted(rest) then redis.call("HDEL", KEY, field) end
    end
  end
end

local function lift_scoped(prefix, lifted)
  for _, subject in ipairs(redis.call("HKEYS", COOLDOWNS)) do
    if string.sub(subject, 1, #prefix) == prefix then
      local rest = rests.read(redis.call("HGET", COOLDOWNS, subject))
      if not rest or lifted(rest) then redis.call("HDEL", COOLDOWNS, subject) end
    end
  end
end

-- Remembers which leases are from before. Tokens are microseconds, or ahead of them.
local function note_clearing(group)
  local stamp, all = rests.next_token(FENCE), redis.call("HGETALL", CLEARED)
  for at = 1, #all, 2 do
    local token = rests.number(all[at + 1]) or 0
    if NOW >= math.floor(token / 1000) + rests.CLEARED_KEPT then redis.call("HDEL", CLEARED, all[at]) end
  end
  local text = string.format("%.0f", stamp)
  redis.call("HSET", CLEARED, "key:" .. KEY_ID, text)
  if group then redis.call("HSET", CLEARED, "group:" .. group, text) end
end

local function always() return true end
local function valid(rest) return not rests.is_invalid(rest) end
local function doubted(rest) return rests.is_invalid(rest) or rest.doubt end

if WORD == "disable" then
  redis.call("HSET", KEY, "status", "disabled")
  redis.call("HDEL", KEY, "drained")
elseif WORD == "drain" then
  redis.call("HSET", KEY, "status", "disabled", "drained", "1")
elseif WORD == "enable" then
  redis.call("HSET", KEY, "status", "available")
  redis.call("HDEL", KEY, "drained")
  lift_own(nil, rests.is_invalid)
  lift_scoped("key:" .. KEY_ID .. "@", rests.is_invalid)
elseif WORD == "clear" then
  redis.call("HDEL", KEY, "learned_cap", "learned_at_ms")
  lift_own(nil, valid)
  lift_scoped("key:" .. KEY_ID .. "@", valid)
  local group = redis.call("HGET", KEY, "group")
  if group and rests.learns_group(group) then
    group = redis.call("HGET", KEY, "group:" .. (redis.call("HGET", KEY, "fingerprint") or ""))
  end
  if group then
    redis.call("HDEL", GROUPS, group)
    redis.call("HDEL", COOLDOWNS, "group:" .. group)
    lift_scoped("group:" .. group .. "|", always)
  end
  note_clearing(group)
elseif WORD == "good" then
  lift_own(FINGERPRINT, doubted)
  lift_scoped("key:" .. KEY_ID .. "@" .. FINGERPRINT, doubted)
elseif WORD == "doubted" or WORD == "bad" then
  local stamp, doubt = rests.next_token(FENCE), WORD == "doubted"
  local evidence = {
    class = CLASS,
    first_ms = DOUBTED_MS,
    most_ms = DOUBTED_MS,
    forever = not doubt,
    doubt = doubt,
    by_check = true,
    token = stamp,
    status = tonumber(ARGV[8]),
    code = ARGV[9] ~= "" and ARGV[9] or nil,
  }
  local rest = rests.after(rests.read(redis.call("HGET", KEY, "rest:" .. FINGERPRINT)), evidence, stamp)
  rests.set_own(KEY, FINGERPRINT, rest)
end
rests.show(KEY)
redis.call("PUBLISH", CHANNEL, "changed " .. SELF .. " " .. PROVIDER)
return { NOW, 1 }
