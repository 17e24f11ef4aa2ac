#!lua flags=allow-oom
-- Delivers up to a total over the lanes of a queue: each lane's quota first, then what is left, by priority.
--
-- KEYS  1-3 task streams: high, normal, low
-- ARGV  1 clock offset (unused)   2 group   3 consumer   4 total   5-7 the lanes' quotas
-- Returns one list of stream entries for each lane.
local left = tonumber(ARGV[4])
local lanes = {{}, {}, {}}
local function read(lane, count)
  if count < 1 then return end
  local reply = redis.call(
    'XREADGROUP', 'GROUP', ARGV[2], ARGV[3], 'COUNT', count, 'STREAMS', KEYS[lane], '>')
  if not reply then return end
  local entries = reply[1][2]
  left = left - #entries
  if #lanes[lane] == 0 then
    lanes[lane] = entries
  else
    for i = 1, #entries do lanes[lane][#lanes[lane] + 1] = entries[i] end
  end
  return #entries == count
end
local more = {}
for lane = 1, 3 do
  local quota = math.min(tonumber(ARGV[4 + lane]), left)
  more[lane] = quota < 1 or read(lane, quota)
end
for lane = 1, 3 do
  if left < 1 then break end
  if more[lane] then read(lane, left) end
end
return lanes
