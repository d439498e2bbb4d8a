--[[ evidence.lua: what answers, checks and people say of a rest, weighed and written. Follows rests.lua in the scripts
  that are told; lending, which is asked more often by far, does without it, for each function costs it at each call. ]]
rests.FINGERPRINTS = 4 -- secrets of one key whose own rests are remembered
rests.SCOPED = 1024 -- rests in the hash of cooldowns before no more are kept for models with a name
rests.SAMPLE = 8 -- of them looked at then for one that may go
rests.CLEARED_KEPT = 86400000 -- how long what a person cleared is remembered
rests.GROUP_CAPS = 256 -- groups whose learned caps are remembered

-- Whether the caller's words alone may have set it, so that others need not make room for it.
function rests.is_light(rest) return rest.class == "access" or rest.doubt == true end

function rests.next_token(fence)
  local token = math.max(rests.last_token(fence) + 1, NOW_US)
  rests.set_token(fence, token)
  return token
end

-- A token that cannot have been issued counts as older than all.
function rests.believed(fence, token)
  if token <= math.max(rests.last_token(fence), NOW_US) then return token end
  return 0
end

-- The longest evidence wins, only a newer lease's refusal grows the wait, and only a success ends a
-- probation. `evidence`: class, said_ms or nil, first_ms, most_ms, probation, forever, doubt, by_check,
-- status, code, lease, token, of_model.
function rests.after(old, evidence, stamp)
  if old and rests.is_forgotten(old) then old = nil end
  local probed = old and old.probe_lease ~= nil and old.probe_lease == evidence.lease
  local fresh = not old or (evidence.token > old.token and (NOW >= old.until_ms or probed))
  local strikes = old and old.class == evidence.class and old.strikes or 0
  if evidence.most_ms > evidence.first_ms and not evidence.said_ms and fresh then strikes = strikes + 1 end
  local wait = evidence.said_ms
    or math.min(evidence.first_ms * 2 ^ math.min(math.max(strikes - 1, 0), 20), evidence.most_ms)
  local until_ms = evidence.forever and rests.FOREVER or NOW + wait
  if old and old.until_ms >= until_ms then
    old.probation = old.probation or evidence.probation or nil
    old.of_model = old.of_model or evidence.of_model or nil
    if fresh then
      old.token = stamp
      if old.class == evidence.class then old.strikes = strikes end
    end
    return old
  end
  return {
    class = evidence.class,
    since_ms = NOW,
    until_ms = until_ms,
    token = stamp,
    strikes = strikes,
    probation = evidence.probation or (old and old.probation) or nil,
    probe_lease = old and old.probe_lease or nil,
    probed_at_ms = NOW,
    doubt = evidence.doubt or nil,
    by_check = evidence.by_check or nil,
    status = evidence.status,
    code = evidence.code,
    of_model = evidence.of_model or (old and old.of_model) or nil,
  }
end

-- Writes a key's own rest, and forgets the oldest of another secret where there are too many.
function rests.set_own(key, fingerprint, rest)
  local field = "rest:" .. fingerprint
  if redis.call("HEXISTS", key, field) == 0 then
    local current = redis.call("HGET", key, "fingerprint")
    local count, oldest, oldest_since = 0, nil, nil
    for _, other in ipairs(redis.call("HKEYS", key)) do
      if string.sub(other, 1, 5) == "rest:" then
        local known = rests.read(redis.call("HGET", key, other))
        if not known or rests.is_forgotten(known) then
          redis.call("HDEL", key, other)
        else
          count = count + 1
          local since = tonumber(known.since_ms) or 0
          if other ~= "rest:" .. (current or "") and (not oldest or since < oldest_since) then
            oldest, oldest_since = other, since
          end
        end
      end
    end
    if count >= rests.FINGERPRINTS and oldest then redis.call("HDEL", key, oldest) end
  end
  redis.call("HSET", key, field, rests.text(rest))
  rests.show(key)
end

local function names_model(subject)
  local model = string.match(subject, "^[^|]*|(.*)$")
  return model ~= nil and model ~= "-"
end

-- Looks at a few rests for models with a name, any of them: those go that are healed, or else one that weighs less
-- than the coming one. So a caller who makes names up pushes nothing out, and costs the same with each. A server
-- that cannot name any of them at random keeps what it has; what is healed goes when it is next reconciled.
local function make_room_for(cooldowns, coming)
  local sample, lighter, room = redis.pcall("HRANDFIELD", cooldowns, rests.SAMPLE), nil, false
  for _, subject in ipairs(sample) do
    local known = rests.read(redis.call("HGET", cooldowns, subject))
    if not known or rests.is_forgotten(known) then
      redis.call("HDEL", cooldowns, subject)
      room = true
    elseif names_model(subject) and rests.is_light(known) then
      lighter = subject
    end
  end
  if not room and lighter and not rests.is_light(coming) then
    redis.call("HDEL", cooldowns, lighter)
    room = true
  end
  return room
end

-- Writes a scoped rest; false where there are too many and this one is not kept.
function rests.set_scoped(cooldowns, subject, rest)
  if
    names_model(subject)
    and redis.call("HLEN", cooldowns) >= rests.SCOPED
    and redis.call("HEXISTS", cooldowns, subject) == 0
    and not make_room_for(cooldowns, rest)
  then
    return false
  end
  redis.call("HSET", cooldowns, subject, rests.text(rest))
  return true
end
