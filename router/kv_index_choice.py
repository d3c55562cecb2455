"""The mirror while it is small enough for this process, Redis itself when it is not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum

from redis.exceptions import RedisError

from kvhive.proto.block_hash import BlockKey
from kvhive.router.kv_index import KvIndex
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.kv_index_reader import KvIndexReader
from kvhive.router.kv_index_redis import COUNT_INTERVAL_S, KvIndexRedis

log = logging.getLogger(__name__)


class IndexKind(StrEnum):
    """`router.index`."""

    AUTO = "auto"
    MIRROR = "mirror"
    REDIS = "redis"


class KvIndexChoice:
    """A KvIndex that is one of two.

    `auto` begins as the mirror and becomes Redis when the workers have more than `mirror_blocks` blocks in
    the index; it does not go back, because a fleet that was large once will be so again, and filling a
    mirror costs a second per million blocks.
    """

    def __init__(
        self,
        kind: IndexKind,
        mirror_blocks: int,
        mirror: KvIndexMirror,
        reader: KvIndexReader,
        remote: KvIndexRedis,
    ) -> None:
        self._kind = kind
        self._mirror_blocks = mirror_blocks
        self._mirror = mirror
        self._reader = reader
        self._remote = remote
        self._used: KvIndex = remote if kind is IndexKind.REDIS else mirror

    @property
    def kind(self) -> IndexKind:
        """Which one answers now."""
        return IndexKind.REDIS if self._used is self._remote else IndexKind.MIRROR

    async def run(self) -> None:
        """Feed whichever is used until cancelled."""
        if self._kind is IndexKind.MIRROR:
            await self._reader.run()
        if self._kind is IndexKind.AUTO:
            await self._mirror_while_it_fits()
        await self._remote.run()

    async def prepare(self, keys: Sequence[BlockKey]) -> None:
        """See KvIndex."""
        await self._used.prepare(keys)

    def match(self, keys: Sequence[BlockKey]) -> Mapping[str, int]:
        """See KvIndex."""
        return self._used.match(keys)

    def block_count(self, worker_id: str) -> int:
        """See KvIndex."""
        return self._used.block_count(worker_id)

    def total_blocks(self) -> int:
        """See KvIndex."""
        return self._used.total_blocks()

    def staleness_s(self) -> float:
        """See KvIndex."""
        return self._used.staleness_s()

    async def _mirror_while_it_fits(self) -> None:
        reading = asyncio.create_task(self._reader.run())
        try:
            while await self._blocks() <= self._mirror_blocks:
                await asyncio.wait([reading], timeout=COUNT_INTERVAL_S)
                if reading.done():
                    await reading  # it only ends by a fault, which is the supervisor's to hear of
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        log.warning(
            "more than router.index_mirror_blocks=%d blocks: prompts are looked up in Redis from here on",
            self._mirror_blocks,
        )
        self._used = self._remote
        self._reader.stop()
        # Millions of entries: a slice at a time, so that nobody's tokens wait for it.
        left = True
        while left:
            left = self._mirror.sweep()
            await asyncio.sleep(0)
        self._mirror.clear()

    async def _blocks(self) -> int:
        try:
            return await self._remote.count()
        except (RedisError, OSError):
            return 0  # the reader says it, and goes on with what it has
