#!lua flags=allow-oom
-- Makes a version current: the last write of a commit, when its chunks are complete. A rollback's is kept at once,
-- with the chunks of the version that it restores. Versions that are no longer kept leave the history in the same
-- step, and their chunks are noted as garbage.
--
-- KEYS  1 lease   2 current manifest   3 kept manifests by version   4 garbage   5 ledger
-- ARGV  1 clock offset (unused)   2 token   3 version   4 manifest   5 "1" when it is kept
--       6 ledger entry, "" for none   7 entries that the ledger keeps
--       8 name of a note of chunks to remove, "" for none   9 their keys, packed
--       10.. versions that leave the history
-- Returns 1 (also when this manifest is current already); 0 when the token is no longer the newest.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
if redis.call('GET', KEYS[2]) == ARGV[4] then return 1 end
if ARGV[8] ~= '' then redis.call('HSET', KEYS[4], ARGV[8], ARGV[9]) end
if ARGV[5] == '1' then redis.call('HSET', KEYS[3], ARGV[3], ARGV[4]) end
if #ARGV > 9 then redis.call('HDEL', KEYS[3], unpack(ARGV, 10)) end
if ARGV[6] ~= '' then redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[7], '*', 'commit', ARGV[6]) end
redis.call('SET', KEYS[2], ARGV[4])
return 1
