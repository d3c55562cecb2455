"""Which blocks a worker holds, asked of the index in Redis: advice for a hand-over."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.index_schema import IndexKeys, WorkerRecord

log = logging.getLogger(__name__)

_KEYS_AT_ONCE = 1024


class IndexHolds:
    """Implements HeldKeys."""

    def __init__(self, redis: Redis, keys: IndexKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def held(self, worker: WorkerRecord, chains: Sequence[Sequence[BlockKey]]) -> set[BlockKey]:
        """Return those of the chains' keys that a worker holds; nothing when Redis is away."""
        wanted = list({key for chain in chains for key in chain})
        blocks, found = self._keys.blocks(worker.worker_id, worker.epoch), set[BlockKey]()
        try:
            for start in range(0, len(wanted), _KEYS_AT_ONCE):
                some = wanted[start : start + _KEYS_AT_ONCE]
                answers = await self._redis.smismember(blocks, list[bytes](some))
                found.update(key for key, held in zip(some, answers, strict=True) if held)
        except (RedisError, OSError) as error:
            log.warning("index not readable, handing over blindly: %r", error)
        return found
