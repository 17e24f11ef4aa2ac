#!lua flags=allow-oom
-- Gives entries that were not started back to the group: to the consumer "returned" (or "suspects"), which counts
-- as dead at once, and with a delivery count as if they had never been delivered.
--
-- KEYS  1-3 task streams: high, normal, low   4 workers   5 control stream
-- ARGV  1 clock offset (unused)   2 group   3 worker   4 name of the returned consumer
--       then pairs: lane (1-3), entry id
-- Returns how many were given back; those that are not the worker's are left alone.
local given = 0
for i = 5, #ARGV, 2 do
  local stream, id = KEYS[tonumber(ARGV[i])], ARGV[i + 1]
  local row = redis.call('XPENDING', stream, ARGV[2], id, id, 1)[1]
  if row and row[2] == ARGV[3] then
    redis.call('XCLAIM', stream, ARGV[2], ARGV[4], 0, id,
      'IDLE', 3600000, 'RETRYCOUNT', math.max(0, row[4] - 1), 'JUSTID')
    given = given + 1
  end
end
if given > 0 then
  redis.call('ZADD', KEYS[4], 0, ARGV[4])
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', '1000', '*', 'returned', given)
  redis.call('PEXPIRE', KEYS[5], 86400000)
end
return given
