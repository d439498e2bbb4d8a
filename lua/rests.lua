--[[ rests.lua: cooldowns as the scripts see them. Follows clock.lua in every script that lends or reports.
  A rest is JSON, in the field `rest:<fingerprint>` of a key's hash where it is the key's own, else in the
  hash of cooldowns under its subject (`key:<key>@<fingerprint>|<model>`, `group:<group>`,
  `group:<group>|<model>`, `provider|<model>`; of requests whose model is not known it is `-`, and `provider` without
  one). Its fields: class, since_ms, until_ms (none: until a check or a person ends it), token (as text), strikes,
  probation, probe_lease, probed_at_ms, doubt, by_check, status, code, of_model (a request that named a model was
  refused). The rules are those of src/store/rules/rest.rs, held against them by the property tests. ]]
local rests = {
  FOREVER = math.huge,
  GROWTH_REMEMBERED = 600000, -- how long a rest's growth is remembered after its end
  EARLY_PROBE_EVERY = 1800000, -- how often an exhausted subject is tried before its end
  STEP = 60000, -- how long a learned cap stays, and each step of its way back up takes
  CAP_KEPT = 86400000, -- how long a learned cap is remembered
  USED_EVERY = 1000, -- how often it is written that a key is used
}

-- A number that counts exactly: Lua takes "nan" and "inf" for numbers, and beyond 2^53 skips some. Else nil.
function rests.number(value)
  local number = tonumber(value)
  if number and number > -9007199254740992 and number < 9007199254740992 then return number end
end

local function only(kind, value)
  if type(value) == kind then return value end
end

-- What cannot be a rest is none, whoever wrote it.
function rests.read(text)
  if not text then return nil end
  local ok, row = pcall(cjson.decode, text)
  if not ok or type(row) ~= "table" or type(row.class) ~= "string" then return nil end
  local rest = {
    class = row.class,
    since_ms = rests.number(row.since_ms) or 0,
    until_ms = rests.number(row.until_ms),
    token = rests.number(row.token) or 0,
    strikes = rests.number(row.strikes) or 0,
    probation = row.probation == true or nil,
    probe_lease = only("string", row.probe_lease),
    probed_at_ms = rests.number(row.probed_at_ms) or 0,
    doubt = row.doubt == true or nil,
    by_check = row.by_check == true or nil,
    status = rests.number(row.status),
    code = only("string", row.code),
    of_model = row.of_model == true or nil,
  }
  if rest.until_ms == nil then
    if row.until_ms ~= nil or rest.class ~= "invalid" or rest.doubt then return nil end
    rest.until_ms = rests.FOREVER
  end
  return rest
end

function rests.text(rest)
  local row = {}
  for field, value in pairs(rest) do row[field] = value end
  row.token = string.format("%.0f", rest.token)
  if rest.until_ms == rests.FOREVER then row.until_ms = nil end
  return cjson.encode(row)
end

function rests.is_invalid(rest) return rest.class == "invalid" and not rest.doubt end
function rests.is_resting(rest) return NOW < rest.until_ms end
function rests.is_probation(rest) return NOW >= rest.until_ms and rest.probation == true end

function rests.is_forgotten(rest)
  if NOW < rest.until_ms or rest.probation then return false end
  return rest.strikes == 0 or NOW >= rest.until_ms + rests.GROWTH_REMEMBERED
end

-- Whether a success of a request that names a model, or of one that names none, says anything about it.
function rests.is_proved_by(rest, with_model) return with_model or not rest.of_model end

-- What a rest says to who wants to lend its subject: a word, and for `cooling` and `early` its end and class. A
-- probe that can prove nothing would only take the turn of one that can.
function rests.gate(rest, probe_is_live, with_model)
  if rests.is_invalid(rest) then return "invalid" end
  if rests.is_resting(rest) then
    local due = rest.class == "quota" and NOW >= rest.probed_at_ms + rests.EARLY_PROBE_EVERY
    if due and not probe_is_live and rests.is_proved_by(rest, with_model) then
      return "early", rest.until_ms, rest.class
    end
    return "cooling", rest.until_ms, rest.class
  end
  if not rest.probation then return "open" end
  if probe_is_live then return "out" end
  return "probe"
end

-- Tokens rise with each lease, also across a loss of data; %.0f, for Lua prints large numbers in E notation.
function rests.last_token(fence) return rests.number(redis.call("GET", fence)) or 0 end
function rests.set_token(fence, token) redis.call("SET", fence, string.format("%.0f", token)) end

-- A key's status from its own rest, as people see it.
function rests.status(disabled, fingerprint, own)
  if disabled then return "disabled" end
  if not fingerprint then return "pending" end
  if not own then return "available" end
  if rests.is_invalid(own) then return "invalid" end
  if rests.is_resting(own) then
    return own.class == "rate" and "rate_limited" or own.class == "quota" and "exhausted" or "cooldown"
  end
  return rests.is_probation(own) and "probation" or "available"
end

-- A learned cap now, one more with each step; nil once it is forgotten, and where it cannot be one.
function rests.learned_cap(cap, since_ms)
  local known, age = rests.number(cap), math.max(NOW - (rests.number(since_ms) or 0), 0)
  if not known or age >= rests.CAP_KEPT then return nil end
  return math.max(math.floor(known), 1) + math.floor(age / rests.STEP)
end

-- The same of a group: JSON of cap and since_ms, in the hash of groups.
function rests.group_row(text)
  if not text then return nil end
  local ok, row = pcall(cjson.decode, text)
  if ok and type(row) == "table" then return row end
end

function rests.group_cap(text)
  local row = rests.group_row(text)
  if row then return rests.learned_cap(row.cap, row.since_ms) end
end

-- Whether answers say which group it is: `auto`, or a name that one of them gave. A key's hash holds the name
-- by secret, in the field `group:<fingerprint>`.
function rests.learns_group(group)
  return group == "auto" or string.sub(group, 1, 5) == "auto."
end

-- Writes `status`, `reason`, `cooldown_until_ms` and `probe_lease` of a key's hash anew, for people: lending
-- looks at the rests, and at `status` only for `disabled`.
function rests.show(key)
  local known = redis.call("HMGET", key, "status", "fingerprint", "drained")
  local own = known[2] and rests.read(redis.call("HGET", key, "rest:" .. known[2])) or nil
  local status = rests.status(known[1] == "disabled", known[2], own)
  redis.call("HSET", key, "status", status)
  local reason = status == "disabled" and (known[3] and "drained" or "operator") or nil
  if own and status ~= "disabled" and status ~= "available" then
    reason = own.by_check and "check" or own.class
  end
  local show = { reason = reason }
  if own and rests.is_resting(own) and own.until_ms ~= rests.FOREVER then
    show.cooldown_until_ms = string.format("%.0f", own.until_ms)
  end
  if own then show.probe_lease = own.probe_lease end
  for _, field in ipairs({ "reason", "cooldown_until_ms", "probe_lease" }) do
    if show[field] then
      redis.call("HSET", key, field, show[field])
    else
      redis.call("HDEL", key, field)
    end
  end
end
