#!lua flags=allow-oom
-- Strikes a worker off when it holds nothing; what still holds entries is left for the claim to find.
--
-- KEYS  1-3 task streams: high, normal, low   4 workers   5 known tasks   6 its settle numbers
-- ARGV  1 clock offset (unused)   2 group   3 worker
-- Returns 1 when it is gone. The last to leave takes streams that are empty along.
for lane = 1, 3 do
  if #redis.call('XPENDING', KEYS[lane], ARGV[2], '-', '+', 1, ARGV[3]) > 0 then return 0 end
end
for lane = 1, 3 do redis.call('XGROUP', 'DELCONSUMER', KEYS[lane], ARGV[2], ARGV[3]) end
redis.call('ZREM', KEYS[4], ARGV[3])
redis.call('HDEL', KEYS[5], ARGV[3])
redis.call('DEL', KEYS[6])
if redis.call('ZCARD', KEYS[4]) == 0 then
  for lane = 1, 3 do
    if redis.call('XLEN', KEYS[lane]) == 0 then redis.call('DEL', KEYS[lane]) end
  end
end
return 1
