"""The index where it lies: each prompt is one question to Redis, for indexes larger than this process.

A script bisects each worker's SET, about a dozen probes for those that hold the first block and one for the
others, so the length of a prompt hardly counts. On a Redis Cluster, where no script may read two workers'
keys, the first block is asked of all in one pipeline and the script runs once per holder.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.index_schema import IndexKeys, WorkerRecord
from kvhive.proto.kv_events import pack_keys
from kvhive.proto.retry import backoff_s, raise_if_cancelled
from kvhive.router.redis_connection import is_cluster
from kvhive.router.worker_registry import WorkerRegistry

log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 0.25
"""Longest a request waits for this advice; without it, it goes by load and home."""
KEPT_ANSWERS = 4096
"""Answers of prompts that are being placed; the oldest go first."""
COUNT_INTERVAL_S = 1.0

# KEYS: workers' blocks. ARGV: packed keys of a chain. Returns a length per key. A key of another type holds
# nothing. Read-only, so a replica answers it, too.
LOOKUP = """
local packed, count = ARGV[1], #ARGV[1] / 16
local function holds(blocks, i)
  return redis.pcall('SISMEMBER', blocks, string.sub(packed, i * 16 - 15, i * 16)) == 1
end
local lengths = {}
for number, blocks in ipairs(KEYS) do
  local low, high = 0, 0
  if holds(blocks, 1) then low, high = 1, count end
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if holds(blocks, middle) then low = middle else high = middle - 1 end
  end
  lengths[number] = low
end
return lengths
"""
_LOOKUP_SHA = hashlib.sha1(LOOKUP.encode(), usedforsecurity=False).hexdigest()

_Holder = tuple[str, int]
"""Worker id and epoch."""


@dataclass(slots=True)
class LookupCounters:
    """What happened since the index was made."""

    lookups: int = 0
    failures: int = 0
    """Look-ups that Redis did not answer in time, or at all."""
    skipped: int = 0
    """Requests that went without, because Redis had just failed another one."""


class KvIndexRedis:
    """A KvIndex that asks Redis. For the event loop's thread.

    `on_stored` handlers hear (worker id, keys) of what a look-up found, so that predictions can be settled.
    """

    def __init__(
        self,
        redis: Redis,
        keys: IndexKeys,
        registry: WorkerRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = LookupCounters()
        self.on_stored: list[Callable[[str, Sequence[BlockKey]], None]] = []
        self._redis = redis
        self._keys = keys
        self._clock = clock
        self._cluster = is_cluster(redis)
        self._epochs: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._answers: OrderedDict[tuple[BlockKey, int], dict[_Holder, int]] = OrderedDict()
        self._fresh_at = -math.inf
        self._failures = 0
        self._retry_at = -math.inf
        registry.on_join.append(self._follow)
        registry.on_leave.append(self._unfollow)
        for view in registry.views():
            self._follow(view.record)

    async def run(self) -> None:
        """Count the workers' blocks until cancelled, which also shows whether Redis is there."""
        while True:
            raise_if_cancelled()
            try:
                await self.count()
            except (RedisError, OSError) as error:
                self._failed(error)
            await asyncio.sleep(min(COUNT_INTERVAL_S, max(0.05, self._retry_at - self._clock())))

    async def count(self) -> int:
        """Ask how many blocks each worker has in the index; return the sum. Raises RedisError, OSError."""
        asked_at = self._clock()
        epochs = dict(self._epochs)
        async with self._redis.pipeline(transaction=False) as pipe:
            for worker_id, epoch in epochs.items():
                pipe.scard(self._keys.blocks(worker_id, epoch))
            answers = await pipe.execute(raise_on_error=False) if epochs else [await self._redis.ping()]
        for answer in answers:
            if isinstance(answer, OSError | RedisError) and "WRONGTYPE" not in str(answer):
                raise answer
        counts = dict(zip(epochs, answers, strict=False))
        self._counts = {worker_id: n for worker_id, n in counts.items() if isinstance(n, int)}
        self._answered(asked_at)
        return sum(self._counts.values())

    async def prepare(self, keys: Sequence[BlockKey]) -> None:
        """Ask Redis about a chain, unless it failed a moment ago."""
        if not keys or not self._epochs:
            return
        chain = keys[-1], len(keys)
        if self._clock() < self._retry_at:
            self.counters.skipped += 1
            self._answers.pop(chain, None)  # nobody knows how old it is
            return
        asked_at = self._clock()
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                lengths = await self._look_up(list(self._epochs.items()), keys)
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            self.counters.failures += 1
            self._answers.pop(chain, None)
            self._failed(error)
            return
        self.counters.lookups += 1
        self._answered(asked_at)
        self._answers[chain] = lengths
        self._answers.move_to_end(chain)
        while len(self._answers) > KEPT_ANSWERS:
            self._answers.popitem(last=False)
        for (worker_id, _), length in lengths.items():
            for tell in self.on_stored:
                tell(worker_id, keys[:length])

    def match(self, keys: Sequence[BlockKey]) -> Mapping[str, int]:
        """What the last look-up of this chain said of workers that are still there, in the same epoch."""
        lengths = self._answers.get((keys[-1], len(keys)), {}) if keys else {}
        return {
            worker_id: length
            for (worker_id, epoch), length in lengths.items()
            if self._epochs.get(worker_id) == epoch
        }

    def block_count(self, worker_id: str) -> int:
        """Blocks of a worker at the last count."""
        return self._counts.get(worker_id, 0)

    def total_blocks(self) -> int:
        """Blocks of all workers at the last count."""
        return sum(self._counts.values())

    def staleness_s(self) -> float:
        """Seconds since Redis last answered; what it answers is up to date."""
        return self._clock() - self._fresh_at

    async def _look_up(self, holders: list[_Holder], keys: Sequence[BlockKey]) -> dict[_Holder, int]:
        names = [self._keys.blocks(worker_id, epoch) for worker_id, epoch in holders]
        packed = pack_keys(list(keys))
        if not self._cluster:
            lengths = await self._run_script(names, packed)
            return {holder: n for holder, n in zip(holders, lengths, strict=True) if n}
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.execute_command("SISMEMBER", name, keys[0])
            found = await pipe.execute(raise_on_error=False)
        firsts = [(h, n) for h, n, there in zip(holders, names, found, strict=True) if there == 1]
        answers = await asyncio.gather(*(self._run_script([name], packed) for _, name in firsts))
        return {holder: n for (holder, _), (n,) in zip(firsts, answers, strict=True) if n}

    async def _run_script(self, names: list[str], packed: bytes) -> list[int]:
        try:
            answer: Any = await self._redis.evalsha(_LOOKUP_SHA, len(names), *names, packed)
        except NoScriptError:
            answer = await self._redis.eval(LOOKUP, len(names), *names, packed)
        return [int(length) for length in answer]

    def _follow(self, record: WorkerRecord) -> None:
        self._epochs[record.worker_id] = record.epoch

    def _unfollow(self, worker_id: str) -> None:
        self._epochs.pop(worker_id, None)
        self._counts.pop(worker_id, None)

    def _answered(self, asked_at: float) -> None:
        if self._failures:
            log.info("index answers again")
        self._failures, self._retry_at = 0, -math.inf
        self._fresh_at = max(self._fresh_at, asked_at)

    def _failed(self, error: Exception) -> None:
        """After a failure nobody asks for a moment, so that a Redis that hangs delays few requests."""
        self._failures += 1
        self._retry_at = self._clock() + backoff_s(self._failures)
        if self._failures == 1:
            log.warning("index does not answer, routing by load: %r", error)
