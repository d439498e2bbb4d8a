--[[ trial.lua: try every command that the other scripts use, to name the rules a user lacks. Follows clock.lua.
  KEYS[1]  lessor:{trial}:<id>           a key that nobody uses; gone at the end
  ARGV     1 channel for events
  Returns  now in ms, then each command that was refused for lack of a right
  Atomic   leaves nothing behind
  Clock    Redis TIME ]]
local KEY, CHANNEL = KEYS[1], ARGV[1]
local COMMANDS = {
  { "EXISTS", KEY }, { "GET", KEY }, { "SET", KEY, "1" }, { "DEL", KEY },
  { "HSET", KEY, "f", "1" }, { "HSETNX", KEY, "f", "1" }, { "HGET", KEY, "f" }, { "HMGET", KEY, "f" },
  { "HGETALL", KEY }, { "HEXISTS", KEY, "f" }, { "HKEYS", KEY }, { "HLEN", KEY }, { "HDEL", KEY, "f" },
  { "ZADD", KEY, 1, "m" }, { "ZSCORE", KEY, "m" }, { "ZCARD", KEY }, { "ZCOUNT", KEY, "-inf", "+inf" },
  { "ZRANGEBYSCORE", KEY, "-inf", "+inf" }, { "PEXPIRE", KEY, 60000 }, { "PEXPIREAT", KEY, NOW + 60000 },
  { "ZREMRANGEBYSCORE", KEY, "-inf", 0 }, { "ZREM", KEY, "m" }, { "DEL", KEY }, { "PUBLISH", CHANNEL, "trial" },
}
local refused = { NOW }
for _, command in ipairs(COMMANDS) do
  local answer = redis.pcall(unpack(command))
  if type(answer) == "table" and answer.err then
    local text = answer.err
    if string.find(text, "NOPERM", 1, true) or string.find(text, "ACL failure", 1, true)
      or string.find(text, "can't run this command", 1, true) then
      refused[#refused + 1] = command[1]
    end
  end
end
return refused
