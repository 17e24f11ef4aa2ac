#!lua flags=allow-oom
-- Renews a worker's lease.
--
-- KEYS  1 workers
-- ARGV  1 clock offset in ms   2 worker
-- Returns Redis time in ms; nil when the worker was struck off.
if not redis.call('ZSCORE', KEYS[1], ARGV[2]) then return false end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[2])
return string.format('%.0f', now)
