"""The index over a real Redis of its own: how late a router hears, and how fast it catches up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from redis.asyncio import Redis

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.index_schema import IndexKeys, LoadReport, WorkerRecord, WorkerState
from kvhive.proto.kv_events import KvEvent
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.kv_index_reader import KvIndexReader
from kvhive.router.kv_index_redis import KvIndexRedis
from kvhive.router.redis_connection import open_redis
from kvhive.router.worker_registry import ModelSpec, WorkerRegistry
from kvhive.scripts.bench_routing_work import BLOCKS_PER_EVENT, key_number
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.worker.kv_event_publisher import KvEventPublisher

IDENTITY = "ab" * 32
LEASE_S = 30.0
STEADY_BATCHES_PER_S = 200
STEADY_BATCHES = 600
BEHIND_BATCHES = 400
"""Of each worker, below what its stream keeps."""
LOOKUPS = 200
QUICK_SHARE = 20
"""A quick run does this much less."""


class _Loop(Protocol):
    def run(self) -> Coroutine[Any, Any, None]: ...


_L = TypeVar("_L", bound=_Loop)


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """What was seen."""

    staleness_p50_ms: float
    staleness_p99_ms: float
    caught_up_blocks_per_s: float
    """Blocks a second that a router applied from streams of 16 blocks a batch that it was behind in."""
    lookup_p50_us: float
    """One prompt looked up in Redis itself, by the other implementation of KvIndex."""


def measure(workers: int, quick: bool) -> LiveFigures:
    """Run it; takes about ten seconds, a quick run one. Raises ClusterError where no Redis can be started."""
    with (
        tempfile.TemporaryDirectory(prefix="kvhive-bench-") as folder,
        EmbeddedRedis(Path(folder) / "redis") as server,
    ):
        return asyncio.run(_measure(server.url, workers, QUICK_SHARE if quick else 1))


async def _measure(url: str, workers: int, share: int) -> LiveFigures:
    async with open_redis(url, 5.0) as redis, _running(await _publishers(redis, workers)) as publishers:
        registry = WorkerRegistry(redis, IndexKeys("bench"), ModelSpec(IDENTITY, 16), LEASE_S, 1.0)
        mirror = KvIndexMirror()
        reader = KvIndexReader(redis, registry.keys, registry, mirror)
        remote = KvIndexRedis(redis, registry.keys, registry)
        await _until(lambda: _joined(registry, workers))
        numbers = itertools.count()
        async with _running([reader]):
            await _until(lambda: _is(mirror.staleness_s() < LEASE_S))  # what a snapshot brings is not told
            late = await _staleness(publishers, reader, numbers, STEADY_BATCHES // share)
        rate = await _catch_up(publishers, (reader, mirror), numbers, BEHIND_BATCHES // share)
        lookups = await _lookups(remote, publishers)
    late.sort()
    middle = sorted(lookups)[len(lookups) // 2]
    return LiveFigures(late[len(late) // 2] * 1e3, late[int(len(late) * 0.99)] * 1e3, rate, middle * 1e6)


async def _staleness(
    publishers: Sequence[KvEventPublisher], reader: KvIndexReader, numbers: itertools.count[int], batches: int
) -> list[float]:
    """Seconds from a worker's event to the mirror that has it, at a steady rate."""
    told: dict[BlockKey, float] = {}
    late: list[float] = []

    def heard(worker_id: str, keys: Sequence[BlockKey]) -> None:
        now = time.perf_counter()
        late.extend(now - told.pop(key) for key in keys if key in told)

    reader.on_stored.append(heard)
    began = time.perf_counter()
    for number in range(batches):
        batch = _events(numbers)
        told[batch[-1].key] = time.perf_counter()
        publishers[number % len(publishers)].add(batch)
        await asyncio.sleep(max(0.0, began + (number + 1) / STEADY_BATCHES_PER_S - time.perf_counter()))
    await _until(lambda: _is(not told))
    reader.on_stored.remove(heard)
    return late


async def _catch_up(
    publishers: Sequence[KvEventPublisher],
    read_into: tuple[KvIndexReader, KvIndexMirror],
    numbers: itertools.count[int],
    batches: int,
) -> float:
    """Blocks a second, by a reader that stood still while the workers published."""
    reader, mirror = read_into
    for _ in range(batches):
        for publisher in publishers:
            publisher.add(_events(numbers))
        await _until(lambda: _is(all(publisher.lag_batches == 0 for publisher in publishers)))
    known, goal = mirror.total_blocks(), sum(len(publisher.held()) for publisher in publishers)
    began = time.perf_counter()
    async with _running([reader]):
        await _until(lambda: _is(mirror.total_blocks() >= goal))
        return (goal - known) / (time.perf_counter() - began)


async def _lookups(remote: KvIndexRedis, publishers: Sequence[KvEventPublisher]) -> list[float]:
    keys = sorted(publishers[0].held())[:512]
    times = []
    for _ in range(LOOKUPS):
        began = time.perf_counter()
        await remote.prepare(keys)
        remote.match(keys)
        times.append(time.perf_counter() - began)
    return times


async def _publishers(redis: Redis, workers: int) -> list[KvEventPublisher]:
    keys, load = IndexKeys("bench"), LoadReport(blocks_total=1_000_000)
    found = []
    for number in range(workers):
        record = WorkerRecord(
            f"w{number}", "127.0.0.1:1", 0, "m", IDENTITY, 16, 8192, 100, WorkerState.SERVING, "none", 1
        )
        found.append(KvEventPublisher(redis, keys, record, LEASE_S, 1.0, lambda: load))
    return found


def _events(numbers: itertools.count[int]) -> list[KvEvent]:
    keys = (key_number(1 << 41, next(numbers)) for _ in range(BLOCKS_PER_EVENT))
    return [KvEvent(BlockKey(number.to_bytes(8, "little") * 2)) for number in keys]


@contextlib.asynccontextmanager
async def _running(loops: Sequence[_L]) -> AsyncIterator[Sequence[_L]]:
    tasks = [asyncio.create_task(each.run()) for each in loops]
    try:
        yield loops
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _joined(registry: WorkerRegistry, workers: int) -> bool:
    await registry.poll()
    return len(registry.views()) == workers


async def _is(value: bool) -> bool:
    return value


async def _until(check: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if await check():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError("not within 120 s")
