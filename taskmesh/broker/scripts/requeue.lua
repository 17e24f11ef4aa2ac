#!lua flags=allow-oom
-- Puts a dead letter back into its queue, or throws it away; once, however often it is asked.
--
-- KEYS  1 stream of dead letters   2 task stream of its lane   3 its result, which a new try makes void
--       4 cancelled set   5 control stream   6.. its blob chunks (to unlink, when discarded)
-- ARGV  1 clock offset (unused)   2 the letter's entry id   3 the message, "" to discard   4 the message's id
-- Returns 1 when it was there.
if #redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2]) == 0 then return 0 end
if ARGV[3] ~= '' then
  redis.call('XADD', KEYS[2], '*', 'message', ARGV[3])
  redis.call('UNLINK', KEYS[3])
  -- Whoever puts it back wants it run, even if somebody wanted it cancelled before it failed.
  redis.call('ZREM', KEYS[4], ARGV[4])
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', '1000', '*', 'requeued', ARGV[4])
  redis.call('PEXPIRE', KEYS[5], 86400000)
elseif #KEYS > 5 then
  redis.call('UNLINK', unpack(KEYS, 6))
end
redis.call('XDEL', KEYS[1], ARGV[2])
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1]) end
return 1
