#!lua flags=allow-oom
-- Renews a worker's lease.
--
-- KEYS  1 workers
-- ARGV  1 clock offset in ms   2 worker
-- Returns Redis time in ms; nil when the worker has lost its lease.
local seen = redis.call('ZSCORE', KEYS[1], ARGV[2])
if not seen or seen == '1' then return false end  -- 1: it has been robbed, and is there for what it still holds
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[2])
return string.format('%.0f', now)
