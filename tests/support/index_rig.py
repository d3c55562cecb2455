"""Publishers and a router's mirror over one Redis, without engines, models or doors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from redis.asyncio import Redis
from redis_fixtures import eventually

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.index_schema import IndexKeys, LoadReport, WorkerRecord, WorkerState
from kvhive.proto.kv_events import KvEvent, RemovalCause
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.kv_index_reader import KvIndexReader
from kvhive.router.worker_registry import ModelSpec, WorkerRegistry
from kvhive.worker.kv_event_publisher import KvEventPublisher

KEYS = IndexKeys("test")
IDENTITY = "ab" * 32
LEASE_S = 1.0


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def stored(*numbers: int) -> list[KvEvent]:
    return [KvEvent(key(n)) for n in numbers]


def removed(*numbers: int) -> list[KvEvent]:
    return [KvEvent(key(n), RemovalCause.EVICTED) for n in numbers]


@dataclass
class Router:
    registry: WorkerRegistry
    mirror: KvIndexMirror
    reader: KvIndexReader

    def knows(self, worker_id: str) -> set[bytes]:
        slot = self.mirror._slots.get(worker_id)
        return set(slot.keys) if slot else set()


@contextlib.asynccontextmanager
async def running(*loops: object) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each.run()) for each in loops]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        done, stuck = await asyncio.wait(tasks, timeout=5)
        assert not stuck
        for task in done:
            assert task.cancelled() or task.exception() is None, task.exception()


@contextlib.asynccontextmanager
async def routing(redis: Redis, lease_s: float = LEASE_S) -> AsyncIterator[Router]:
    registry = WorkerRegistry(redis, KEYS, ModelSpec(IDENTITY, 16), lease_s, 1.0, poll_s=0.05)
    mirror = KvIndexMirror()
    router = Router(registry, mirror, KvIndexReader(redis, KEYS, registry, mirror))
    async with running(registry, router.reader):
        yield router


@contextlib.asynccontextmanager
async def worker(
    redis: Redis, worker_id: str = "w1", load: LoadReport | None = None, lease_s: float = LEASE_S
) -> AsyncIterator[KvEventPublisher]:
    record = WorkerRecord(
        worker_id, "127.0.0.1:1", 0, "demo", IDENTITY, 16, 2048, 49152, WorkerState.SERVING, "cpu", 1
    )
    publisher = KvEventPublisher(redis, KEYS, record, lease_s, 0.1, lambda: load or LoadReport())
    async with running(publisher):
        yield publisher


async def agrees(router: Router, publisher: KvEventPublisher, worker_id: str = "w1") -> None:
    await eventually(lambda: publisher.lag_batches == 0 and router.knows(worker_id) == publisher.held())
