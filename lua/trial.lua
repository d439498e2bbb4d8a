--[[ trial.lua: try every command that lessor needs on its keys, to name the rules a user lacks. Stands alone, for
  even TIME may be lacking.
  KEYS[1]  lessor:{trial}:<id>           a key that nobody uses; gone at the end
  ARGV     1 channel for events, 2 pattern of all keys
  Returns  each rule of an ACL that is lacking; or READONLY, where this server takes no writes
  Atomic   leaves nothing behind
  Clock    none needed ]]
local KEY, CHANNEL, PATTERN = KEYS[1], ARGV[1], ARGV[2]
local COMMANDS = {
  { "TIME" }, { "EXISTS", KEY }, { "GET", KEY }, { "SET", KEY, "1" }, { "DEL", KEY },
  { "HSET", KEY, "f", "1" }, { "HSETNX", KEY, "f", "1" }, { "HGET", KEY, "f" }, { "HMGET", KEY, "f" },
  { "HGETALL", KEY }, { "HEXISTS", KEY, "f" }, { "HKEYS", KEY }, { "HRANDFIELD", KEY, "1" },
  { "HLEN", KEY }, { "HDEL", KEY, "f" },
  { "ZADD", KEY, 1, "m" }, { "ZSCORE", KEY, "m" }, { "ZCARD", KEY }, { "ZCOUNT", KEY, "-inf", "+inf" },
  { "ZRANGEBYSCORE", KEY, "-inf", "+inf" }, { "PEXPIRE", KEY, 60000 }, { "PEXPIREAT", KEY, 32503680000000 },
  { "ZREMRANGEBYSCORE", KEY, "-inf", 0 }, { "ZREM", KEY, "m" }, { "DEL", KEY },
  { "SCAN", "0", "COUNT", "1" }, { "PUBLISH", CHANNEL, "trial" },
}
local lacking, named = {}, {}
local function lacks(rule)
  if not named[rule] then lacking[#lacking + 1] = rule end
  named[rule] = true
end
for _, command in ipairs(COMMANDS) do
  local answer = redis.pcall(unpack(command))
  local text = type(answer) == "table" and answer.err or ""
  local function says(words) return string.find(text, words, 1, true) end
  if says("READONLY") then return answer end
  -- Redis 7 says it in the first words, older ones, and newer ones in part, with the code
  if says("can't run this command") or says("permissions to run") then
    lacks("+" .. string.lower(command[1]))
  elseif says("can't access at least one of the keys") or says("of the keys") then
    lacks("~" .. PATTERN)
  elseif says("can't publish") or says("of the channels") then
    lacks("&" .. CHANNEL)
  elseif says("NOPERM") or says("ACL failure") then
    lacks("+" .. string.lower(command[1]))
  end
end
return lacking
