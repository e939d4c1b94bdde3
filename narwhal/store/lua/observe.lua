#!lua flags=allow-oom
-- One consistent look at everything that the lease protocol reads.
-- It only reads, yet it is not flagged no-writes: a replica, and a server that refuses writes, must refuse this look as
-- well, since a lease that could not be written there must never be read as free.
-- KEYS: lease token epoch claim release handoff
local lease, token, epoch, claim, release, handoff = unpack(KEYS)
local order = redis.call('HMGET', handoff, 'tok', 'ver')
return {
  redis.call('GET', lease),
  redis.call('PTTL', lease),
  redis.call('GET', token),
  redis.call('GET', epoch),
  redis.call('GET', claim),
  redis.call('GET', release),
  order[1],
  order[2],
}
