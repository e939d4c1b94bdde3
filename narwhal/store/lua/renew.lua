#!lua flags=allow-oom
-- Extend exactly this term. It never sets the key: a lease that ran out stays gone, and no other term is overwritten.
-- KEYS: lease claim
-- ARGV: record ttl_ms
-- Returns: renewed <claim or nil> | lost <record or nil>
local current = redis.call('GET', KEYS[1])
if current ~= ARGV[1] then
  return {'lost', current}
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {'renewed', redis.call('GET', KEYS[2])}
