#!lua flags=allow-oom
-- Take the free lease and mint its fencing token, in one step. A lease that holds exactly the term to be deposed, which
-- is known to be over, counts as free.
-- allow-oom: a full Redis must not mean that nobody can take over.
-- KEYS: lease token epoch claim handoff events
-- ARGV: router incarnation record-up-to-token record-after-token ttl_ms floor epoch-seen token-seen epoch-new events-max
--       record-to-depose
-- Returns: granted <record> | mine <record> | occupied <record> <pttl> | data_lost | exhausted <number>
local lease, token, epoch, claim, handoff, events = unpack(KEYS)
local router, incarnation, head, tail, ttl, floor, epoch_seen, token_seen, epoch_new, events_max, over = unpack(ARGV)

local current = redis.call('GET', lease)
if current and current ~= over then
  local readable, record = pcall(cjson.decode, current)
  if readable and type(record) == 'table' and record.router == router and record.incarnation == incarnation then
    -- Ours already: the reply that said so was lost. The caller counts its deadline from this call, so extend.
    redis.call('PEXPIRE', lease, ttl)
    return {'mine', current}
  end
  return {'occupied', current, redis.call('PTTL', lease)}
end
if epoch_seen ~= '' and redis.call('GET', epoch) ~= epoch_seen then
  return {'data_lost'}
end
-- Another term since the look, which vanished again: what proved that nobody holds says nothing about that one.
if token_seen ~= '' and (redis.call('GET', token) or '0') ~= token_seen then
  return {'data_lost'}
end

-- The clock keeps tokens rising when every key is lost; the others keep them rising when the clock steps back.
local clock = redis.call('TIME')
local now_ms = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local highest = math.max(
  tonumber(redis.call('GET', token) or 0), tonumber(redis.call('HGET', handoff, 'tok') or 0), tonumber(floor))
-- Above 2^53 a Lua number no longer tells two neighbours apart.
if highest >= 9007199254740991 then
  return {'exhausted', string.format('%.0f', highest)}
end
local minted = string.format('%.0f', math.max(highest + 1, now_ms))
local record = head .. minted .. tail

redis.call('SET', token, minted)
redis.call('SET', lease, record, 'PX', ttl)
redis.call('SET', epoch, epoch_new, 'NX')
redis.call('DEL', claim)
if current then
  redis.call('XADD', events, 'MAXLEN', '~', events_max, '*', 'type', 'depose',
    'router', router, 'incarnation', incarnation, 'token', string.format('%.0f', cjson.decode(current).token))
end
redis.call('XADD', events, 'MAXLEN', '~', events_max, '*',
  'type', 'acquire', 'router', router, 'incarnation', incarnation, 'token', minted)
return {'granted', record}
