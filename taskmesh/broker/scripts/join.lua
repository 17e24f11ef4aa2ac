#!lua flags=allow-oom
-- Enters a worker in a queue: its lease, what it knows, and the parked messages that it can run.
--
-- KEYS  1-3 task streams: high, normal, low   4 workers   5 known tasks   6 parked   7 control stream
--       8 cancelled set
-- ARGV  1 clock offset in ms   2 group   3 worker   4 the tasks it knows: "\n" before, between and after
--       5 where to begin among the parked   6 how many of them to look at   7 how many cancelled ids at most
-- Returns {id of the last control entry, cancelled message ids from the oldest, how many were released, where to
--       begin next among the parked: "" when all were looked at}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
for lane = 1, 3 do
  local made = redis.pcall('XGROUP', 'CREATE', KEYS[lane], ARGV[2], '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
end
redis.call('ZADD', KEYS[4], string.format('%.0f', now), ARGV[3])
redis.call('HSET', KEYS[5], ARGV[3], ARGV[4])

local released = 0
local parked = redis.call('XRANGE', KEYS[6], ARGV[5], '+', 'COUNT', ARGV[6])
for _, entry in ipairs(parked) do
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  local lane = string.match(fields.message or '', '^.([012])')
  if lane and string.find(ARGV[4], '\n' .. (fields.task or '') .. '\n', 1, true) then
    redis.call('XADD', KEYS[lane + 1], '*', 'message', fields.message)
    redis.call('XDEL', KEYS[6], entry[1])
    released = released + 1
  end
end
if released > 0 and redis.call('XLEN', KEYS[6]) == 0 then redis.call('DEL', KEYS[6]) end
local last = redis.call('XREVRANGE', KEYS[7], '+', '-', 'COUNT', 1)[1]
local more = #parked == tonumber(ARGV[6]) and '(' .. parked[#parked][1] or ''
return {last and last[1] or '0-0', redis.call('ZRANGE', KEYS[8], -tonumber(ARGV[7]), -1), released, more}
