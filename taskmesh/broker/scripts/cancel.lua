#!lua flags=allow-oom
-- Cancels a message: one that waits is ended here and now, one that runs or cannot be found is marked.
--
-- KEYS  1-3 task streams: high, normal, low   4 delayed set   5 cancelled set   6 control stream
--       7 its result   8 its producer's reply stream   9.. its blob chunks
-- ARGV  1 clock offset in ms   2 group   3 message id   4 lane (1-3)
--       5 where it was put: an entry id, a due time in ms, or "" when that is not known
--       6 outcome   7 ttl of the outcome in ms, 0 for no record   8 how long a mark is kept in ms
-- Returns "ended" (too late), "cancelled" (it will never run) or "requested" (its worker was told).
local id, place = ARGV[3], ARGV[5]
if redis.call('EXISTS', KEYS[7]) == 1 then return 'ended' end

local found = false
if string.find(place, '-', 1, true) then
  local stream = KEYS[tonumber(ARGV[4])]
  local entry = redis.call('XRANGE', stream, place, place)[1]
  if entry and string.sub(entry[2][2], 3, 22) == id then
    local pending = redis.pcall('XPENDING', stream, ARGV[2], place, place, 1)
    if pending.err or #pending == 0 then
      redis.call('XDEL', stream, place)
      found = true
    end
  end
elseif place ~= '' then
  -- Any number may be due in the same ms. Equal scores lie in the order of their bytes: the message's head, put
  -- there for a moment, shows where it is. Its first byte is the wire version: plain, or signed.
  for version = 1, 2 do
    local head = string.char(version) .. (tonumber(ARGV[4]) - 1) .. id
    redis.call('ZADD', KEYS[4], place, head)
    local rank = redis.call('ZRANK', KEYS[4], head)
    redis.call('ZREM', KEYS[4], head)
    local message = redis.call('ZRANGE', KEYS[4], rank, rank)[1]
    if message and string.sub(message, 1, 22) == head then
      redis.call('ZREM', KEYS[4], message)
      found = true
      break
    end
  end
end
if found then
  if ARGV[7] ~= '0' then redis.call('SET', KEYS[7], ARGV[6], 'PX', ARGV[7]) end
  redis.call('XADD', KEYS[8], 'NOMKSTREAM', '*', id, ARGV[6])
  if #KEYS > 8 then redis.call('UNLINK', unpack(KEYS, 9)) end
  return 'cancelled'
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', string.format('%.0f', now - tonumber(ARGV[8])))
redis.call('ZADD', KEYS[5], string.format('%.0f', now), id)
redis.call('PEXPIRE', KEYS[5], ARGV[8])
redis.call('XADD', KEYS[6], 'MAXLEN', '~', '1000', '*', 'cancel', id)
redis.call('PEXPIRE', KEYS[6], 86400000)
return 'requested'
