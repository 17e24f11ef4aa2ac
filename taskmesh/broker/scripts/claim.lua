#!lua flags=allow-oom
-- Takes entries over from a worker that was seen dead, if it has not been heard of since. When nothing is left
-- with it, its consumers are deleted and it is struck off, in the same step. Until then it is on the list as the sweep
-- puts it there: without a lease, and knowing nothing, so that nobody gives it an entry back.
--
-- KEYS  1-3 task streams: high, normal, low   4 workers   5 known tasks   6 its settle numbers
-- ARGV  1 clock offset (unused)   2 group   3 the dead worker   4 its last-seen as observed   5 claimer
--       6 how many entries at most
-- Returns for each lane a list of {entry id, message, deliveries so far}.
local group, dead, claimer, left = ARGV[2], ARGV[3], ARGV[5], tonumber(ARGV[6])
local lanes = {{}, {}, {}}
local seen = redis.call('ZSCORE', KEYS[4], dead)
if seen ~= ARGV[4] or not redis.call('ZSCORE', KEYS[4], claimer) then return lanes end
local empty = true
for lane = 1, 3 do
  local rows = redis.call('XPENDING', KEYS[lane], group, '-', '+', left + 1, dead)
  if #rows > left then
    empty = false
    rows[#rows] = nil
  end
  left = left - #rows
  if #rows > 0 then
    local ids, deliveries = {}, {}
    for i = 1, #rows do
      ids[i] = rows[i][1]
      deliveries[rows[i][1]] = rows[i][4]
    end
    local claimed = redis.call('XCLAIM', KEYS[lane], group, claimer, 0, unpack(ids))
    for i = 1, #claimed do
      lanes[lane][i] = {claimed[i][1], claimed[i][2][2], deliveries[claimed[i][1]] + 1}
    end
  end
end
redis.call('HDEL', KEYS[5], dead)
if empty then
  for lane = 1, 3 do redis.call('XGROUP', 'DELCONSUMER', KEYS[lane], group, dead) end
  redis.call('ZREM', KEYS[4], dead)
  redis.call('DEL', KEYS[6])
elseif tonumber(seen) > 1 then
  redis.call('ZADD', KEYS[4], 1, dead)
end
return lanes
