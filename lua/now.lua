--[[ now.lua: what time it is. Follows clock.lua.
  KEYS[1]  any name of lessor's; it only chooses the node
  Returns  now in ms
  Clock    Redis TIME ]]
return { NOW }
