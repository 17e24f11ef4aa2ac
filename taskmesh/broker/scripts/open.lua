#!lua
-- Makes a client's reply stream, with its time to live in the same step: a client that dies in between leaves nothing.
--
-- KEYS  1 reply stream
-- ARGV  1 clock offset (unused)   2 its ttl in ms
-- Returns the id of its first entry, which is no outcome.
local id = redis.call('XADD', KEYS[1], 'MAXLEN', 1, '*', 'opened', '')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return id
