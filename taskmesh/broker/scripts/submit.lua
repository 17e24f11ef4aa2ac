-- Adds one batch of a producer to a queue, once, however often it is sent. It is not headed "#!lua": a full server
-- would then refuse it before it could say that the batch is in. As it is, the first write is refused.
--
-- KEYS  1-3 task streams: high, normal, low   4 delayed set   5 the producer's record   6 control stream
--       7.. blob chunks that become persistent with the batch
-- ARGV  1 clock offset in ms   2 the batch's number   3 bound on messages that are not settled, 0 for none
--       4 ttl of the producer's record in ms   5 how many messages are due now
--       then those messages, then pairs of due time and message; "+n" is n ms from now, "n" is Redis time in ms
-- Returns {accepted, place, ...}: an entry id or a due time for each accepted message, in order.
--       A batch seen before is not added again: {accepted} alone. A blob that is gone: {-1}.
local number = tonumber(ARGV[2])
local seen = redis.call('GET', KEYS[5])
if seen then
  local last, accepted = string.match(seen, '^(%d+):(%d+)$')
  if number <= tonumber(last) then
    -- A write, for the WAIT that may follow: it counts from what its own connection wrote.
    redis.call('PEXPIRE', KEYS[5], ARGV[4])
    return {tonumber(accepted)}
  end
end

if #KEYS > 6 then
  local chunks = {unpack(KEYS, 7)}
  if redis.call('EXISTS', unpack(chunks)) < #chunks then return {-1} end
end

local due_now = tonumber(ARGV[5])
local total = due_now + (#ARGV - 5 - due_now) / 2
local bound = tonumber(ARGV[3])
if bound > 0 then
  local length = redis.call('ZCARD', KEYS[4])
  for lane = 1, 3 do length = length + redis.call('XLEN', KEYS[lane]) end
  total = math.max(0, math.min(total, bound - length))
  if total == 0 then return {0} end
end

local reply = {total}
for i = 1, math.min(due_now, total) do
  local message = ARGV[5 + i]
  reply[i + 1] = redis.call('XADD', KEYS[string.byte(message, 2) - 47], '*', 'message', message)
end
if total > due_now then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
  local first = redis.call('ZRANGE', KEYS[4], 0, 0, 'WITHSCORES')[2]
  local earliest
  for i = due_now + 1, total do
    local at = 6 + due_now + 2 * (i - due_now - 1)
    local due = ARGV[at]
    local ms = tonumber(due)
    if string.sub(due, 1, 1) == '+' then ms = now + ms end
    redis.call('ZADD', KEYS[4], string.format('%.0f', ms), ARGV[at + 1])
    reply[i + 1] = string.format('%.0f', ms)
    if not earliest or ms < earliest then earliest = ms end
  end
  if not first or earliest < tonumber(first) then
    redis.call('XADD', KEYS[6], 'MAXLEN', '~', '1000', '*', 'due', string.format('%.0f', earliest))
    redis.call('PEXPIRE', KEYS[6], 86400000)
  end
end
for i = 7, #KEYS do redis.call('PERSIST', KEYS[i]) end
redis.call('SET', KEYS[5], ARGV[2] .. ':' .. string.format('%.0f', total), 'PX', ARGV[4])
return reply
