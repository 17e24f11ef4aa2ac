-- The least that an atomic ending can be, for the bare round trip of `benchmarks.bare`.
-- KEYS[1]  stream of tasks       KEYS[2]  stream of replies       KEYS[3]  the task's result
-- ARGV[1]  consumer group        ARGV[2]  entry id                ARGV[3]  result      ARGV[4]  its seconds to live
redis.call('SET', KEYS[3], ARGV[3], 'EX', ARGV[4])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'r', ARGV[3])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
return redis.call('XDEL', KEYS[1], ARGV[2])
