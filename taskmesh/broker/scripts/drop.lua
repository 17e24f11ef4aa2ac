#!lua flags=allow-oom
-- Takes versions out of the history, and notes their chunks as garbage.
--
-- KEYS  1 lease   2 kept manifests by version   3 garbage
-- ARGV  1 clock offset (unused)   2 token   3 name of the note   4 the chunks' keys, packed   5.. the versions
-- Returns 1; 0 when the token is no longer the newest.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
redis.call('HDEL', KEYS[2], unpack(ARGV, 5))
return 1
