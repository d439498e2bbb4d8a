-- The scripts run in Redis: Lua 5.1 with these names, and each follows clock.lua, rests.lua or evidence.lua too.
std = "lua51"
max_line_length = 125
read_globals = { "redis", "cjson", "KEYS", "ARGV", "NOW", "NOW_US", "rests" }
files["lua/clock.lua"] = { ignore = { "211", "431" }, globals = { "NOW", "NOW_US" } }
files["lua/evidence.lua"] = { globals = { "rests" } }
files["lua/rests.lua"] = { ignore = { "241", "211", "431" }, globals = { "rests" } }
