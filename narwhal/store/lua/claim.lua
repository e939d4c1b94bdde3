#!lua flags=allow-oom
-- Ask the holder of exactly the expected term to give way. A standing claim is not overwritten.
-- KEYS: lease claim events
-- ARGV: record claim ttl_ms router incarnation token reason events-max
-- Returns: 1 when this very claimant's claim stands, else 0
local lease, claim, events = unpack(KEYS)
local record, wish, ttl, router, incarnation, token, reason, events_max = unpack(ARGV)
if redis.call('GET', lease) ~= record then
  return 0
end
if redis.call('SET', claim, wish, 'NX', 'PX', ttl) then
  redis.call('XADD', events, 'MAXLEN', '~', events_max, '*', 'type', 'claim',
    'router', router, 'incarnation', incarnation, 'token', token, 'reason', reason)
  return 1
end
local standing = cjson.decode(redis.call('GET', claim))
if standing.router == router and standing.incarnation == incarnation then
  return 1
end
return 0
