--[[ clock.lua: what time it is. Every script begins with this file.
  Clock    Redis TIME, the one clock of all sidecars; it stands still while a script runs ]]
local function clock()
  local time = redis.call("TIME")
  local seconds, micros = tonumber(time[1]), tonumber(time[2])
  return seconds * 1000 + math.floor(micros / 1000), seconds * 1000000 + micros
end
local NOW, NOW_US = clock() -- ms and microseconds since the Unix epoch
