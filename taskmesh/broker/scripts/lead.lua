#!lua flags=allow-oom
-- Takes a run's leadership, if it is free or its time has run out. Each leadership has a fencing token of its own,
-- one higher than the last; asking again while the lease holds returns the same one and renews it.
--
-- KEYS  1 lease
-- ARGV  1 clock offset in ms   2 owner   3 ttl in ms
-- Returns {token, "0"} when it is held now, else {0, ms that are left to its owner, that owner}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
local lease = redis.call('HMGET', KEYS[1], 'owner', 'expires_ms', 'token')
local left = lease[2] and tonumber(lease[2]) - now or 0
local mine = lease[1] == ARGV[2]
if left > 0 and not mine then return {0, string.format('%.0f', left), lease[1]} end
local token = left > 0 and tonumber(lease[3]) or redis.call('HINCRBY', KEYS[1], 'token', 1)
redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'expires_ms', string.format('%.0f', now + tonumber(ARGV[3])))
return {token, '0'}
