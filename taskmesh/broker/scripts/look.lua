#!lua flags=allow-oom
-- Looks for workers that have not been heard of for a while.
--
-- KEYS  1 workers
-- ARGV  1 clock offset in ms   2 for how many ms
-- Returns {Redis time in ms, how many workers there are, worker, last seen, worker, last seen, ...}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
local silent = redis.call('ZRANGE', KEYS[1], '-inf', string.format('%.0f', now - tonumber(ARGV[2])), 'BYSCORE',
  'LIMIT', 0, 1000, 'WITHSCORES')
return {string.format('%.0f', now), redis.call('ZCARD', KEYS[1]), unpack(silent)}
