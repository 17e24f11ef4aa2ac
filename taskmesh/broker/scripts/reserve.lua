#!lua
-- Notes which chunks a master is about to write, so that its successor finds them if it dies before the commit.
--
-- KEYS  1 lease   2 garbage
-- ARGV  1 clock offset (unused)   2 token   3 name of the note   4 the chunks' keys, packed
-- Returns 1; 0 when the token is no longer the newest.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
return 1
