#!lua flags=allow-oom
-- Puts consumers that hold entries without a lease on the list, so that the watchers see them die: a worker that
-- was struck off while its blocking read waited leaves such entries. Consumers that hold nothing are deleted.
--
-- KEYS  1-3 task streams: high, normal, low   4 workers
-- ARGV  1 clock offset (unused)   2 group
-- Returns how many were put on the list.
local listed = 0
for lane = 1, 3 do
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[lane], ARGV[2])) do
    local fields = {}
    for i = 1, #consumer, 2 do fields[consumer[i]] = consumer[i + 1] end
    if not redis.call('ZSCORE', KEYS[4], fields.name) then
      if fields.pending > 0 then
        redis.call('ZADD', KEYS[4], 1, fields.name)
        listed = listed + 1
      else
        redis.call('XGROUP', 'DELCONSUMER', KEYS[lane], ARGV[2], fields.name)
      end
    end
  end
end
return listed
