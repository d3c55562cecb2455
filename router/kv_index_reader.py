"""Keeps the mirror true to Redis: one snapshot per worker and epoch, then the workers' streams.

A snapshot is the stream's newest id, read first, and then the SET; changes made while the SET is read come
again with the stream, and applying them twice is harmless. Batches are numbered, so anything that was
missed shows as a gap and costs one snapshot of that worker alone. What Redis holds is bytes to be checked,
never more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from kvhive.proto.block_hash import BLOCK_KEY_BYTES, BlockKey
from kvhive.proto.index_schema import KEYS_PER_BATCH, IndexKeys, WorkerRecord, parse_stream_id, stream_id
from kvhive.proto.kv_events import EventBatch, RemovalCause, unpack_keys
from kvhive.proto.retry import backoff_s, raise_if_cancelled
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.redis_connection import is_cluster, socket_timeout_of
from kvhive.router.worker_registry import WorkerRegistry

log = logging.getLogger(__name__)

MOST_BATCH_BYTES = KEYS_PER_BATCH * BLOCK_KEY_BYTES
BATCHES_PER_READ = 16
"""Of one stream; a reader that is behind reads again at once."""
BLOCK_S = 0.1
"""Longest wait for news; also how soon a new worker joins the read."""
CLUSTER_POLL_S = 0.02
"""Between two looks at the streams of a Redis Cluster, which lie on many servers: none can be waited for."""


StreamEntry = tuple[bytes, dict[bytes, bytes]]
"""Id and fields, as Redis has them."""


@dataclass(slots=True)
class ReaderCounters:
    """What happened since the reader was made."""

    batches: int = 0
    snapshots: int = 0
    resyncs: int = 0
    """Snapshots of workers that were known before: a gap, a trimmed stream, a new epoch."""
    malformed: int = 0
    """Entries, keys or whole Redis keys that are not what the schema says."""
    failures: int = 0
    """Failed conversations with Redis."""


@dataclass(slots=True, eq=False)
class _Cursor:
    """Where the reader is in one worker's epoch."""

    epoch: int
    synced: bool = False
    last_id: str = ""
    seq: int = 0
    distrusted: bool = False
    """A malformed entry was met and answered with a snapshot; further ones of this epoch are skipped."""
    most_keys: int = 0
    """Blocks of its pool and one batch more, whose removals come after what it stored; 0: unknown."""
    broken: bool = False
    """The keys are of another type; nothing to read until a new epoch."""


def parse_batch(fields: Mapping[bytes, bytes]) -> EventBatch:
    """Read a stream entry; unknown fields are ignored. Raises ValueError, also for too large a batch."""
    size = sum(map(len, fields.values()))
    if size > MOST_BATCH_BYTES:
        raise ValueError(f"a batch of {size} bytes, the limit is {MOST_BATCH_BYTES}")
    stored: tuple[BlockKey, ...] = ()
    removed: dict[RemovalCause, tuple[BlockKey, ...]] = {}
    for name, packed in fields.items():
        if name == b"stored":
            stored = unpack_keys(packed)
        elif name.startswith(b"removed:"):
            removed[RemovalCause(name[len(b"removed:") :].decode())] = unpack_keys(packed)
    return EventBatch(stored, removed)


class KvIndexReader:
    """Mirrors every worker that the registry knows. For the event loop's thread.

    `on_stored` handlers hear (worker id, keys) of each applied batch, so that predictions can be settled.
    """

    def __init__(
        self,
        redis: Redis,
        keys: IndexKeys,
        registry: WorkerRegistry,
        mirror: KvIndexMirror,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = ReaderCounters()
        self.on_stored: list[Callable[[str, Sequence[BlockKey]], None]] = []
        self._redis = redis
        self._keys = keys
        self._mirror = mirror
        self._clock = clock
        self._cursors: dict[str, _Cursor] = {}
        self._caught_up = True
        """Whether the last read left nothing in the streams that it read."""
        self._failures = 0
        # A wait must end before the client takes the silence for a dead server.
        timeout_s = socket_timeout_of(redis)
        self._stopped = False
        self._cluster = is_cluster(redis)
        self._block_s = min(BLOCK_S, timeout_s / 2) if timeout_s else BLOCK_S
        registry.on_join.append(self._follow)
        registry.on_leave.append(self._unfollow)
        for view in registry.views():
            self._follow(view.record)

    async def run(self) -> None:
        """Mirror until cancelled."""
        while True:
            raise_if_cancelled()
            try:
                if self._failures:
                    await self._verify()
                await self.advance()
            except (RedisError, OSError) as error:
                self._failures += 1
                self.counters.failures += 1
                if self._failures == 1:
                    log.warning("index not readable, keeping the mirror: %r", error)
                await asyncio.sleep(backoff_s(self._failures))
            else:
                if self._failures:
                    log.info("index readable again")
                self._failures = 0

    def stop(self) -> None:
        """Let the mirror go and follow nobody from here on. `run` must have ended."""
        self._stopped = True
        for worker_id in list(self._cursors):
            self._unfollow(worker_id)

    async def advance(self) -> None:
        """Snapshot one who needs it, then apply what the streams have; waits BLOCK_S for news at most.

        One, and only when the streams are read to their ends: they go on while a snapshot is read, and hold
        STREAM_MAX_BATCHES. Many snapshots in a row would find gaps afterwards, and begin again for ever.
        """
        for worker_id, cursor in self._unsynced()[: 1 if self._caught_up else 0]:
            await self._snapshot(worker_id, cursor)
        self._mirror.sweep()
        asked_at = self._clock()
        streams = {
            self._keys.events(worker_id, cursor.epoch): worker_id
            for worker_id, cursor in self._cursors.items()
            if cursor.synced
        }
        self._caught_up = True
        if streams:
            try:
                news = await self._read(
                    {name: self._cursors[worker_id].last_id for name, worker_id in streams.items()}
                )
            except ResponseError as error:
                await self._set_aside_broken(error)
                return
            for name, entries in news:
                worker_id = streams[name]
                self._caught_up = self._caught_up and len(entries) < BATCHES_PER_READ
                await self._apply(worker_id, self._cursors.get(worker_id), entries)
        else:
            await self._redis.ping()
        if self._caught_up and not self._unsynced():
            self._mirror.touch(asked_at)
            if not streams:
                await asyncio.sleep(self._block_s)

    def _unsynced(self) -> list[tuple[str, _Cursor]]:
        """Who needs a snapshot, and can be read."""
        return [(w, cursor) for w, cursor in self._cursors.items() if not cursor.synced and not cursor.broken]

    async def _read(self, positions: dict[str, str]) -> list[tuple[str, list[StreamEntry]]]:
        """What stands in the streams after these ids, waiting a little when that is nothing."""
        if not self._cluster:
            known: Any = positions
            block_ms = None if self._unsynced() else max(1, round(self._block_s * 1000))
            return _entries_by_stream(await self._redis.xread(known, count=BATCHES_PER_READ, block=block_ms))
        async with self._redis.pipeline(transaction=False) as pipe:
            for name, last_id in positions.items():
                pipe.xread({name: last_id}, count=BATCHES_PER_READ)
            replies = await pipe.execute()
        news = [entries for reply in replies for entries in _entries_by_stream(reply)]
        if not news and not self._unsynced():
            await asyncio.sleep(min(self._block_s, CLUSTER_POLL_S))
        return news

    def _follow(self, record: WorkerRecord) -> None:
        if self._stopped:
            return
        known = self._cursors.get(record.worker_id)
        if known is None or known.epoch != record.epoch:
            if known is not None and known.synced:
                self.counters.resyncs += 1
            blocks = record.load.blocks_total
            self._cursors[record.worker_id] = _Cursor(
                record.epoch, most_keys=blocks + KEYS_PER_BATCH if blocks > 0 else 0
            )

    def _unfollow(self, worker_id: str) -> None:
        self._cursors.pop(worker_id, None)
        self._mirror.drop(worker_id)

    def _resync(self, worker_id: str, cursor: _Cursor, why: str) -> None:
        cursor.synced = False
        self.counters.resyncs += 1
        log.warning("resync worker_id=%s epoch=%d: %s", worker_id, cursor.epoch, why)

    async def _snapshot(self, worker_id: str, cursor: _Cursor) -> None:
        if cursor.most_keys:
            self._mirror.bound(worker_id, cursor.most_keys)
        load = self._mirror.load(worker_id)
        complete = False
        try:
            top = await self._top(worker_id, cursor)
            position = -1
            while position != 0:
                position, members = await self._redis.sscan(
                    self._keys.blocks(worker_id, cursor.epoch), max(position, 0), count=KEYS_PER_BATCH
                )
                keys = [
                    BlockKey(key) for key in members if isinstance(key, bytes) and len(key) == BLOCK_KEY_BYTES
                ]
                self.counters.malformed += len(members) - len(keys)
                load.add(keys)
            complete = self._cursors.get(worker_id) is cursor
        except ResponseError as error:
            self._break(worker_id, cursor, error)
        finally:
            if complete:
                load.commit()
            else:
                load.abandon()
        if complete:
            cursor.synced = True
            cursor.last_id, cursor.seq = top
            self.counters.snapshots += 1

    async def _top(self, worker_id: str, cursor: _Cursor) -> tuple[str, int]:
        """The newest id of a worker's stream and its number; the epoch's zero when there is none."""
        newest: Any = await self._redis.xrevrange(self._keys.events(worker_id, cursor.epoch), count=1)
        if not newest:
            return stream_id(cursor.epoch, 0), 0
        top = newest[0][0].decode()
        return top, parse_stream_id(top)[1]

    async def _apply(self, worker_id: str, cursor: _Cursor | None, entries: Sequence[StreamEntry]) -> None:
        for entry_id, fields in entries:
            if cursor is None or self._cursors.get(worker_id) is not cursor:
                return  # it left, or began a new epoch, while we gave way to others
            epoch, seq = parse_stream_id(entry_id)
            try:
                batch = parse_batch(fields)
                if epoch != cursor.epoch:
                    raise ValueError(f"entry {entry_id!r} is not of epoch {cursor.epoch}")
            except ValueError as error:
                self.counters.malformed += 1
                if not cursor.distrusted:
                    cursor.distrusted = True
                    self._resync(worker_id, cursor, f"malformed entry: {error}")
                    return
            else:
                if seq != cursor.seq + 1:
                    self._resync(worker_id, cursor, f"batch {seq} came after {cursor.seq}")
                    return
                self._mirror.apply(worker_id, batch)
                self.counters.batches += 1
                for tell in self.on_stored:
                    tell(worker_id, batch.stored)
            cursor.last_id, cursor.seq = entry_id.decode(), seq
            await asyncio.sleep(0)

    async def _verify(self) -> None:
        """After an outage: whoever's stream is behind us has been rolled back, so take what is there now.

        With neither stream nor SET Redis has lost them: what we know stays until the worker's new epoch.
        """
        for worker_id, cursor in list(self._cursors.items()):
            if not cursor.synced:
                continue
            try:
                _, seq = await self._top(worker_id, cursor)
                behind = seq < cursor.seq
                if behind and await self._redis.exists(self._keys.blocks(worker_id, cursor.epoch)):
                    self._resync(worker_id, cursor, f"stream ends at {seq}, we are at {cursor.seq}")
            except ResponseError as error:
                self._break(worker_id, cursor, error)

    async def _set_aside_broken(self, error: ResponseError) -> None:
        """Find the worker whose stream cannot be read, so that the others still are. Raises the rest."""
        _raise_unless_wrong_type(error)
        for worker_id, cursor in list(self._cursors.items()):
            try:
                await self._top(worker_id, cursor)
            except ResponseError as error:
                self._break(worker_id, cursor, error)

    def _break(self, worker_id: str, cursor: _Cursor, error: ResponseError) -> None:
        _raise_unless_wrong_type(error)
        cursor.broken, cursor.synced = True, False
        self._mirror.drop(worker_id)
        self.counters.malformed += 1
        log.error("unreadable until a new epoch worker_id=%s epoch=%d: %s", worker_id, cursor.epoch, error)


def _raise_unless_wrong_type(error: ResponseError) -> None:
    """A key of another type is one worker's; a server that is busy or has lost its master is everybody's."""
    if "WRONGTYPE" not in str(error):
        raise error


def _entries_by_stream(reply: Any) -> list[tuple[str, list[StreamEntry]]]:
    """Bring the two shapes of an XREAD reply (RESP2: pairs, RESP3: a mapping of nested lists) into one."""
    if not reply:
        return []
    if isinstance(reply, dict):
        return [(name.decode(), [entry for part in parts for entry in part]) for name, parts in reply.items()]
    return [(name.decode(), list(entries)) for name, entries in reply]
