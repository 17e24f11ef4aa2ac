#!lua flags=allow-oom
-- Puts a version into the history: the last write of a checkpoint, when its chunks are complete. It takes the place
-- of the same version's manifest, if that one is still current. Versions that are no longer kept leave the history in
-- the same step, and their chunks are noted as garbage. Doing it again changes nothing.
--
-- KEYS  1 lease   2 current manifest   3 kept manifests by version   4 garbage
-- ARGV  1 clock offset (unused)   2 token   3 version   4 manifest   5 the manifest that it stands for, "" for none
--       6 name of the note that "reserve" made
--       7 name of a note of chunks to remove, "" for none   8 their keys, packed
--       9.. versions that leave the history
-- Returns 1; 0 when the token is no longer the newest.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
if ARGV[7] ~= '' then redis.call('HSET', KEYS[4], ARGV[7], ARGV[8]) end
redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
if #ARGV > 8 then redis.call('HDEL', KEYS[3], unpack(ARGV, 9)) end
redis.call('HDEL', KEYS[4], ARGV[6])
if ARGV[5] ~= '' and redis.call('GET', KEYS[2]) == ARGV[5] then redis.call('SET', KEYS[2], ARGV[4]) end
return 1
