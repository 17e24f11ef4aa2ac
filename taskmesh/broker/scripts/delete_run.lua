#!lua flags=allow-oom
-- Removes what is recorded of a run. Its lease stays: fencing tokens must go on rising, or a master that has slept
-- through all of it could hold that of a later one.
--
-- KEYS  1 lease   2 current manifest   3 kept manifests by version   4 ledger
-- ARGV  1 clock offset (unused)   2 token
-- Returns 1; 0 when the token is no longer the newest.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4])
return 1
