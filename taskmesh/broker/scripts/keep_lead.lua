#!lua flags=allow-oom
-- Renews a leadership, or gives it up; refused to a token that is no longer the newest.
--
-- KEYS  1 lease
-- ARGV  1 clock offset in ms   2 token   3 ttl in ms, 0 to give it up
-- Returns 1; 0 when it was refused.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
redis.call('HSET', KEYS[1], 'expires_ms', string.format('%.0f', now + tonumber(ARGV[3])))
return 1
