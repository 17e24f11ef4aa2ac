#!lua flags=allow-oom
-- Moves delayed messages that are due to their task streams.
--
-- KEYS  1-3 task streams: high, normal, low   4 delayed set
-- ARGV  1 clock offset in ms   2 how many at most
-- Returns {moved, ms until the next is due}; -1 when none is left.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
local due = redis.call('ZRANGE', KEYS[4], '-inf', string.format('%.0f', now), 'BYSCORE', 'LIMIT', 0, ARGV[2])
for i = 1, #due do
  -- What is no message goes to a worker too, which refuses it: here it would hold up all that is due.
  local lane = tonumber(string.match(due[i], '^.([012])') or 1) + 1
  redis.call('XADD', KEYS[lane], '*', 'message', due[i])
end
if #due > 0 then redis.call('ZREM', KEYS[4], unpack(due)) end
local first = redis.call('ZRANGE', KEYS[4], 0, 0, 'WITHSCORES')[2]
return {#due, first and math.max(0, tonumber(first) - now) or -1}
