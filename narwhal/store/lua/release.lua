#!lua flags=allow-oom
-- Give exactly this term up, and leave word of it: in the event stream for whoever waits, and beside it for whoever
-- looks later, when the stream has been trimmed.
-- KEYS: lease claim release events
-- ARGV: record release router incarnation token successor events-max
-- Returns: 1, or 0 when the lease is not this term
local lease, claim, release, events = unpack(KEYS)
local record, farewell, router, incarnation, token, successor, events_max = unpack(ARGV)
if redis.call('GET', lease) ~= record then
  return 0
end
redis.call('XADD', events, 'MAXLEN', '~', events_max, '*',
  'type', 'release', 'router', router, 'incarnation', incarnation, 'token', token, 'successor', successor)
redis.call('SET', release, farewell)
redis.call('DEL', lease, claim)
return 1
