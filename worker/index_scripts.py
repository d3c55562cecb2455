"""The Lua scripts by which a worker writes its part of the index (proto/index_schema.py).

Each script is one atomic change, of one worker's keys or of the leases. They answer with a status word
first, so that what a publisher must act on (a lost lease, a lost key, a newer incarnation) is never mixed
up with errors of the server. All run on Redis 6.2 and later, on Valkey, and on a Redis Cluster.

A full Redis refuses commands by the memory state at the start of a script, so the first write either fails
before anything was changed, or none of the following fails for memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class IndexScript:
    """One script and the SHA-1 by which Redis knows it once it has run."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


OK = b"OK"
"""Done, or found to have been done by an earlier try whose answer was lost."""
FENCED = b"FENCED"
"""A newer incarnation of this worker id owns the record; nothing was written."""
EXPIRED = b"EXPIRED"
"""The record is gone (the lease ran out, or Redis lost its data); nothing was written."""
LOST = b"LOST"
"""The stored blocks or batches are not what was acknowledged; nothing was written."""
FULL = b"FULL"
"""Redis is out of memory; the lease was renewed, the record's fields were not."""

_TOP = """
local function top_of(stream)
  local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
  return newest[1] and newest[1][1]
end
"""

# KEYS: record. ARGV: lease ms, our last epoch (0: none), our incarnation, then field, value, ...
# Returns {OK, epoch, epoch found in the record or '0'} or {FENCED, that epoch}.
# Closes the race of a worker that was frozen while its replacement registered: having had an epoch already
# it may not take the record back from a newer one, while a new process (last epoch 0) always takes over. A
# newer one of our own incarnation is ours: we registered, and the answer was lost.
REGISTER = IndexScript(
    """
local found = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0') or 0
local last = tonumber(ARGV[2])
local ours = redis.call('HGET', KEYS[1], 'incarnation') == ARGV[3]
if last > 0 and found > last and not ours then return {'FENCED', string.format('%.0f', found)} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local epoch = string.format('%.0f', math.max(now, last + 1, found + 1))
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'epoch', epoch, 'incarnation', ARGV[3], unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {'OK', epoch, string.format('%.0f', found)}
"""
)

# KEYS: record, blocks, events. ARGV: lease ms, data expiry ms, epoch, blocks expected (-1: unknown), top
# stream id expected ('': none), then field, value, ...
# The lease of a full Redis is renewed by PEXPIRE alone, which no memory limit refuses: workers must not
# drop out because the index has no room.
HEARTBEAT = IndexScript(
    _TOP
    + """
local owner = redis.call('HGET', KEYS[1], 'epoch')
if owner and owner ~= ARGV[3] then return {'FENCED', owner} end
if ARGV[4] ~= '-1' then
  local top = top_of(KEYS[3])
  if redis.call('SCARD', KEYS[2]) ~= tonumber(ARGV[4]) then return {'LOST'} end
  if top and top ~= ARGV[5] then return {'LOST'} end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
local said = redis.pcall('HSET', KEYS[1], unpack(ARGV, 6))
if type(said) == 'table' and said.err then
  if string.find(said.err, 'OOM', 1, true) then return {'FULL'} end
  return said
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {'OK'}
"""
)

# KEYS: workers. ARGV: worker id, lease ms, data expiry ms.
# Returns {OK, worker ids whose deadline is over ...} or {FULL}. The members are few at a time; whoever asked
# looks whether their records are gone, because those may lie on another node.
LEASE = IndexScript(
    """
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local renewed = redis.pcall('ZADD', KEYS[1], string.format('%.0f', now + ARGV[2]), ARGV[1])
if type(renewed) == 'table' and renewed.err then
  if string.find(renewed.err, 'OOM', 1, true) then return {'FULL'} end
  return renewed
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local over = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, 16)
return {'OK', unpack(over)}
"""
)

# KEYS: workers. ARGV: worker ids.
# Takes those out whose deadline is still over. Closes the race of a worker that came back after its record
# was found missing.
FORGET = IndexScript(
    """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, id in ipairs(ARGV) do
  local deadline = redis.call('ZSCORE', KEYS[1], id)
  if deadline and tonumber(deadline) <= now then redis.call('ZREM', KEYS[1], id) end
end
return {'OK'}
"""
)

# KEYS: record, blocks, events. ARGV: epoch, stream id, most batches, data expiry ms, blocks expected before,
# top stream id expected before ('': none), then field, packed keys, ... as they stand in the stream.
# XADD is the first write: an id that is not the newest is refused before the SET is touched. An id that *is*
# the newest is this very batch, whose answer was lost.
PUBLISH = IndexScript(
    _TOP
    + """
local owner = redis.call('HGET', KEYS[1], 'epoch')
if not owner then return {'EXPIRED'} end
if owner ~= ARGV[1] then return {'FENCED', owner} end
local top = top_of(KEYS[3])
if top == ARGV[2] then return {'OK'} end
if top and top ~= ARGV[6] then return {'LOST'} end
if redis.call('SCARD', KEYS[2]) ~= tonumber(ARGV[5]) then return {'LOST'} end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], ARGV[2], unpack(ARGV, 7))
for field = 7, #ARGV, 2 do
  local command = ARGV[field] == 'stored' and 'SADD' or 'SREM'
  local packed = ARGV[field + 1]
  local keys = {}
  for at = 1, #packed, 16 do
    keys[#keys + 1] = string.sub(packed, at, at + 15)
    if #keys == 1000 then redis.call(command, KEYS[2], unpack(keys)) keys = {} end
  end
  if #keys > 0 then redis.call(command, KEYS[2], unpack(keys)) end
end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return {'OK'}
"""
)

# KEYS: record, blocks, events. ARGV: epoch, ms the farewell record stays.
# The record stays a while as STOPPED, so that every router sees it leave rather than vanish.
DEREGISTER = IndexScript(
    """
redis.call('UNLINK', KEYS[2], KEYS[3])
local owner = redis.call('HGET', KEYS[1], 'epoch')
if owner ~= ARGV[1] then return {'FENCED'} end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local said = redis.pcall('HSET', KEYS[1], 'state', 'stopped')
if type(said) == 'table' and said.err then redis.call('DEL', KEYS[1]) end
return {'OK'}
"""
)
