#!lua flags=allow-oom
-- Record a router among the members for a while, and keep the index of members short.
-- KEYS: member members
-- ARGV: document ttl_ms router
local clock = redis.call('TIME')
local now_ms = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now_ms - tonumber(ARGV[2])))
redis.call('ZADD', KEYS[2], string.format('%.0f', now_ms), ARGV[3])
return 1
