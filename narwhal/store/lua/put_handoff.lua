#!lua
-- Replace the mirrored handoff unless a newer token or version is recorded.
-- No allow-oom: a document may be large, and the local file keeps it while Redis is full.
-- KEYS: handoff lease token events
-- ARGV: tok ver schema eng sha doc events-max
-- Returns: stored | same | STALE_TOKEN <seen> | NOT_HOLDER <holder's token, 0 without a lease> <seen> | VERSION <stored>
local handoff, lease, token, events = unpack(KEYS)
local tok, ver, schema, eng, sha, doc, events_max = unpack(ARGV)
local mine = tonumber(tok)

local stored = redis.call('HMGET', handoff, 'tok', 'ver', 'sha')
local seen = math.max(tonumber(redis.call('GET', token) or 0), tonumber(stored[1] or 0))
if mine < seen then
  return {'STALE_TOKEN', string.format('%.0f', seen)}
end
-- Without a lease only the last term may write: its final flush races with the end of its lease.
local current = redis.call('GET', lease)
local holder = current and cjson.decode(current).token or 0
if (current and holder ~= mine) or (not current and mine ~= seen) then
  return {'NOT_HOLDER', string.format('%.0f', holder), string.format('%.0f', seen)}
end
if stored[1] and tonumber(stored[1]) == mine and tonumber(ver) <= tonumber(stored[2]) then
  if tonumber(ver) == tonumber(stored[2]) and sha == stored[3] then
    -- Written already: the reply that said so was lost.
    return {'same'}
  end
  return {'VERSION', stored[2]}
end

local clock = redis.call('TIME')
local now_ms = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
redis.call('HSET', handoff, 'ver', ver, 'tok', tok, 'schema', schema, 'eng', eng, 'sha', sha, 'doc', doc,
  'at', string.format('%.0f', now_ms))
redis.call('XADD', events, 'MAXLEN', '~', events_max, '*', 'type', 'handoff', 'token', tok, 'version', ver)
return {'stored'}
