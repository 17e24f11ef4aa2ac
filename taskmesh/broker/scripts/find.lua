#!lua flags=no-writes
-- Looks for messages in every place where one that has not ended can be, and for their records.
--
-- KEYS  1-3 task streams: high, normal, low   4 delayed set   5 parked   6.. the messages' results
-- ARGV  1 clock offset (unused)   2 how many waiting messages to look through at most   3 how many bytes of them
-- Returns the numbers of the messages of which nothing is left; {-1} when there is more to look through.
local missing, count = {}, 0
for i = 6, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    missing[string.sub(KEYS[i], -20)] = i - 5
    count = count + 1
  end
end
if count == 0 then return {} end

local total = redis.call('ZCARD', KEYS[4]) + redis.call('XLEN', KEYS[5])
for lane = 1, 3 do total = total + redis.call('XLEN', KEYS[lane]) end
if total > tonumber(ARGV[2]) then return {-1} end

-- A hundred at a time: they may be large.
local bytes_left = tonumber(ARGV[3])
local function see(message)
  bytes_left = bytes_left - #message
  missing[string.sub(message, 3, 22)] = nil
end
for _, stream in ipairs({KEYS[1], KEYS[2], KEYS[3], KEYS[5]}) do
  local after = '-'
  while after do
    local entries = redis.call('XRANGE', stream, after, '+', 'COUNT', 100)
    for i = 1, #entries do see(entries[i][2][2]) end
    if bytes_left < 0 then return {-1} end
    after = #entries == 100 and '(' .. entries[100][1]
  end
end
for first = 0, redis.call('ZCARD', KEYS[4]) - 1, 100 do
  for _, message in ipairs(redis.call('ZRANGE', KEYS[4], first, first + 99)) do see(message) end
  if bytes_left < 0 then return {-1} end
end

local gone = {}
for _, number in pairs(missing) do gone[#gone + 1] = number end
return gone
