"""Workers that exist only as records in Redis, and a clock that is told the time."""

from __future__ import annotations

import dataclasses

from redis.asyncio import Redis

from kvhive.proto.index_schema import IndexKeys, WorkerRecord, WorkerState
from kvhive.router.worker_registry import ModelSpec

KEYS = IndexKeys("test")
SPEC = ModelSpec("ab" * 32, 16)
LEASE_S = 30.0
"""Unless a test says otherwise: no slow moment of a machine ends it."""


class Clock:
    """Monotonic seconds that stand still until they are told to go on. Redis' own clock cannot be told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(worker_id: str = "w1", epoch: int = 1, **changes: object) -> WorkerRecord:
    """A serving worker's record that fits SPEC."""
    base = WorkerRecord(
        worker_id, "127.0.0.1:1", epoch, "demo", "ab" * 32, 16, 2048, 49152, WorkerState.SERVING, "cpu", 1
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


async def register(redis: Redis, rec: WorkerRecord, lease_s: float = LEASE_S) -> None:
    """Write a record and its lease as a worker does."""
    seconds, micros = await redis.time()
    await redis.zadd(KEYS.workers, {rec.worker_id: seconds * 1000 + micros // 1000 + lease_s * 1000})
    await redis.hset(KEYS.worker(rec.worker_id), mapping=rec.to_fields())
    await redis.pexpire(KEYS.worker(rec.worker_id), int(lease_s * 1000))
