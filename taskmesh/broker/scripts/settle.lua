#!lua flags=allow-oom
-- Ends deliveries of one stream. Outcomes are written first and entries acknowledged last, so that an error on
-- the way leaves them pending. A success counts from whoever comes first, anything else only from the owner.
--
-- KEYS  1 task stream   2 the worker's settle numbers   3 delayed set   4 dead letters   5 parked   6 known tasks
--       7 cancelled set   8 control stream
--       then a result key for each entry with an outcome, the reply streams, and the blob chunks to unlink
-- ARGV  1 clock offset in ms   2 group   3 worker   4 settle number   5 entries   6 result keys
--       7 reply streams   8 entries with blobs   9 slot of the settle number: one for each call under way
--       then the entries, each beginning with its id and kind:
--         D                                         done; no record
--         S  outcome, ttl ms, reply                 succeeded; reply is the number of a reply stream, 0 for none
--         C  outcome, ttl ms, reply                 cancelled or expired
--         F  outcome, ttl ms, reply, reason         failed: dead-lettered with its reason
--         R  message, delay ms                      to be tried again
--         U  task                                   unknown here: given to a worker that knows it, else parked
--         W  task, own version, message, delay ms   the arguments do not fit here: given to a worker that knows the
--                                                   task, but not in this version; else to be tried again
--         P  worker, message, delay ms              passed on to that worker; where it is not there, to be tried again
--         G  reason, bytes                          cannot be read: dead-lettered with at most so many of its bytes
--       then pairs for the blobs: which entry, how many chunks
-- Returns the numbers of the entries whose claim was lost; {-1} when this settle number was done before.
local stream, group, worker = KEYS[1], ARGV[2], ARGV[3]
if redis.call('HGET', KEYS[2], ARGV[9]) == ARGV[4] then return {-1} end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
local count, results, replies = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local width = {D = 2, S = 5, C = 5, F = 6, R = 4, U = 3, W = 6, P = 5, G = 4}

-- One look at the span of the batch; what it does not show is looked at singly.
local cursor, entries = 10, {}
for i = 1, count do
  entries[i] = cursor
  cursor = cursor + width[ARGV[cursor + 1]]
end
local pending = {}
local rows = redis.call('XPENDING', stream, group, ARGV[entries[1]], ARGV[entries[count]], 2 * count + 16)
for i = 1, #rows do pending[rows[i][1]] = rows[i] end
local function holds(id)
  local row = pending[id]
  if row == nil then
    row = redis.call('XPENDING', stream, group, id, id, 1)[1] or false
    pending[id] = row
  end
  return row
end

local function dead_letter(row, id, reason, outcome, bytes)
  local entry = redis.call('XRANGE', stream, id, id)[1]
  local message = entry and entry[2][2] or ''
  redis.call('XADD', KEYS[4], '*', 'message', string.sub(message, 1, bytes), 'reason', reason,
    'deliveries', row[4], 'worker', worker, 'outcome', outcome, 'at', string.format('%.0f', now))
end

-- A worker on the list that knows a task, and not in the version named; the entry's time picks one of several.
local known
local function who_knows(task, id, version)
  known = known or redis.call('HGETALL', KEYS[6])
  local able = {}
  for i = 1, #known, 2 do
    if known[i] ~= worker and string.find(known[i + 1], '\n' .. task .. '\n', 1, true)
      and not (version and string.find(known[i + 1], '\n' .. version .. '\n', 1, true)) then
      able[#able + 1] = known[i]
    end
  end
  local ms, sequence = string.match(id, '^(%d+)-(%d+)$')
  return able[(tonumber(ms) + tonumber(sequence)) % math.max(1, #able) + 1]
end

local ended, dropped, pushes, uncancel, takers = {}, {}, {}, {}, {}
local result = 8
for i = 1, count do
  local at = entries[i]
  local id, kind = ARGV[at], ARGV[at + 1]
  local row = holds(id)
  local mine = row and (kind == 'S' or kind == 'D' or row[2] == worker)
  if mine then pending[id] = false end  -- a second ending of it in the same call comes too late
  local taker
  if mine and kind == 'U' then taker = who_knows(ARGV[at + 2], id) end
  if mine and kind == 'W' then taker = who_knows(ARGV[at + 2], id, ARGV[at + 3]) end
  if mine and kind == 'P' and ARGV[at + 2] ~= worker and redis.call('HGET', KEYS[6], ARGV[at + 2]) then
    taker = ARGV[at + 2]
  end
  local key
  if kind == 'S' or kind == 'C' or kind == 'F' then
    result = result + 1
    key = KEYS[result]
  end
  if not mine then
    dropped[#dropped + 1] = i
  elseif taker then
    -- Its owner gives it away: it stays pending, and the delivery counts as the taker's.
    redis.call('XCLAIM', stream, group, taker, 0, id, 'RETRYCOUNT', row[4], 'JUSTID')
    takers[taker] = true
  else
    ended[#ended + 1] = id
    if key then
      local outcome, ttl, reply = ARGV[at + 2], ARGV[at + 3], tonumber(ARGV[at + 4])
      if ttl ~= '0' then redis.call('SET', key, outcome, 'PX', ttl) end
      if reply > 0 then
        local push = pushes[reply]
        if not push then
          push = {KEYS[8 + results + reply], 'NOMKSTREAM', 'MAXLEN', '~', '100000', '*'}
          pushes[reply] = push
        end
        push[#push + 1] = string.sub(key, -20)
        push[#push + 1] = outcome
      end
      if kind == 'C' then uncancel[#uncancel + 1] = string.sub(key, -20) end
      if kind == 'F' then dead_letter(row, id, ARGV[at + 5], outcome, -1) end
    elseif kind == 'R' or kind == 'W' or kind == 'P' then
      local message = at + ({R = 2, W = 4, P = 3})[kind]
      redis.call('ZADD', KEYS[3], string.format('%.0f', now + tonumber(ARGV[message + 1])), ARGV[message])
    elseif kind == 'U' then
      local entry = redis.call('XRANGE', stream, id, id)[1]
      if entry then
        redis.call('XADD', KEYS[5], '*', 'message', entry[2][2], 'reason', 'no handler', 'deliveries', row[4],
          'worker', worker, 'outcome', '', 'at', string.format('%.0f', now), 'task', ARGV[at + 2])
      end
    elseif kind == 'G' then
      dead_letter(row, id, ARGV[at + 2], '', tonumber(ARGV[at + 3]))
    end
  end
end
for _, push in pairs(pushes) do redis.call('XADD', unpack(push)) end
for taker in pairs(takers) do
  redis.call('XADD', KEYS[8], 'MAXLEN', '~', '1000', '*', 'given', taker)
  redis.call('PEXPIRE', KEYS[8], 86400000)
end
if #uncancel > 0 then redis.call('ZREM', KEYS[7], unpack(uncancel)) end

local is_dropped = {}
for _, i in ipairs(dropped) do is_dropped[i] = true end
local blob = 8 + results + replies
for i = 1, tonumber(ARGV[8]) do
  local entry, chunks = tonumber(ARGV[cursor]), tonumber(ARGV[cursor + 1])
  cursor = cursor + 2
  if not is_dropped[entry] then redis.call('UNLINK', unpack(KEYS, blob + 1, blob + chunks)) end
  blob = blob + chunks
end

redis.call('HSET', KEYS[2], ARGV[9], ARGV[4])
redis.call('PEXPIRE', KEYS[2], 86400000)
if #ended > 0 then
  redis.call('XACK', stream, group, unpack(ended))
  redis.call('XDEL', stream, unpack(ended))
end
return dropped
