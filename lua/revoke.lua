--[[ revoke.lua: mark a lease to end. Follows clock.lua.
  KEYS[1]  lessor:{p}:lease:<lease>      hash  what the lease was granted for
  ARGV     1 lease, 2 channel for events, 3 this sidecar's name among those who wait, 4 provider
  Returns  now in ms, 1, or 0 where no such lease lives
  Atomic   in one step. Its slot stays taken until its holder gives it back or it expires, for until then the
           holder may still use the key; its next renewal is told that it is lost
  Again    harmless
  Clock    Redis TIME ]]
local LEASE = KEYS[1]
local ends = tonumber(redis.call("HGET", LEASE, "expires_at_ms"))
if not ends or ends <= NOW then return { NOW, 0 } end
redis.call("HSET", LEASE, "revoked", "1")
redis.call("PUBLISH", ARGV[2], "revoked " .. ARGV[3] .. " " .. ARGV[4] .. " " .. ARGV[1])
return { NOW, 1 }
