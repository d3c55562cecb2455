"""The registry against a real server: who joins, who is refused, and who leaves when."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis_fixtures import connect, eventually, kill
from worker_records import KEYS, LEASE_S, SPEC, Clock, record, register

from kvhive.proto.index_schema import LoadReport, WorkerRecord, WorkerState
from kvhive.router.worker_registry import WorkerRegistry
from kvhive.scripts.embedded_redis import EmbeddedRedis

COOLDOWN_S = 5.0


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def join(self, rec: WorkerRecord) -> None:
        self.lines.append(f"+{rec.worker_id}@{rec.epoch}")

    def leave(self, worker_id: str) -> None:
        self.lines.append(f"-{worker_id}")


def registry_of(redis: Redis, clock: Callable[[], float] = time.monotonic) -> tuple[WorkerRegistry, Log]:
    registry, events = WorkerRegistry(redis, KEYS, SPEC, LEASE_S, COOLDOWN_S, poll_s=0.05, clock=clock), Log()
    registry.on_join.append(events.join)
    registry.on_leave.append(events.leave)
    return registry, events


def ids(registry: WorkerRegistry) -> list[str]:
    return [view.record.worker_id for view in registry.routable(registry.clock())]


async def test_joins_serves_and_leaves_with_its_lease(index_redis: Redis) -> None:
    """A worker that falls silent is gone when its lease is over, without any farewell."""
    registry, events = registry_of(index_redis)
    await registry.poll()
    assert registry.views() == []
    await register(index_redis, record(state=WorkerState.STARTING))
    await registry.poll()
    assert len(registry.views()) == 1 and ids(registry) == []
    silent_since = time.monotonic()
    await register(index_redis, record(), lease_s=1.5)
    task = asyncio.create_task(registry.run())
    await eventually(lambda: ids(registry) == ["w1"])
    await eventually(lambda: registry.views() == [])  # within seconds, far below LEASE_S
    assert time.monotonic() - silent_since >= 1.49, "not before the lease was over; Redis counts in whole ms"
    assert events.lines == ["+w1@1", "-w1"]
    assert registry.counters.leases_ended == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_age_of_a_load_report(index_redis: Redis) -> None:
    """A view says when its report was made, not when it was read."""
    registry, _ = registry_of(index_redis, clock := Clock())
    before = time.monotonic()
    await register(index_redis, record(load=LoadReport(queued_prefill_tokens=7)))
    await asyncio.sleep(0.3)
    await registry.poll()
    (view,) = registry.views()
    assert view.record.load.queued_prefill_tokens == 7
    assert 0.29 < clock.now - view.reported_at < time.monotonic() - before + 0.01


async def test_a_lease_renewed_by_expiry_alone_counts(index_redis: Redis) -> None:
    """What a full Redis still allows keeps a worker in; its report is as old as it is."""
    registry, events = registry_of(index_redis, clock := Clock())
    await register(index_redis, record(), lease_s=0.3)
    await index_redis.pexpire(KEYS.worker("w1"), 30_000)
    await registry.poll()
    age = clock.now - registry.views()[0].reported_at
    await asyncio.sleep(0.5)
    await registry.poll()
    assert ids(registry) == ["w1"] and events.lines == ["+w1@1"]
    assert clock.now - registry.views()[0].reported_at > age + 0.49


async def test_a_record_without_a_lease_is_not_alive(index_redis: Redis) -> None:
    """A HASH that never expires, with its deadline over, is nobody."""
    registry, _ = registry_of(index_redis)
    await index_redis.zadd(KEYS.workers, {"w1": 1})
    await index_redis.hset(KEYS.worker("w1"), mapping=record().to_fields())
    await registry.poll()
    assert registry.views() == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"block_size": 32}, "block_size: the router has 16, the worker has 32"),
        ({"model_identity": "cd" * 32}, f"model_identity: the router has {'ab' * 32}"),
    ],
)
async def test_a_mismatch_is_refused_once_per_epoch(
    index_redis: Redis, caplog: pytest.LogCaptureFixture, wrong: dict[str, object], words: str
) -> None:
    """Another block size or model is refused with a line that names both values."""
    registry, events = registry_of(index_redis)
    await register(index_redis, record(**wrong))
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            await registry.poll()
    assert registry.views() == [] and events.lines == []
    assert registry.counters.refused == 1
    assert [r.getMessage() for r in caplog.records if words in r.getMessage()] != []
    assert len(caplog.records) == 1
    assert words in registry.refusals()["w1"]
    await register(index_redis, record(epoch=2, **wrong))
    await registry.poll()
    assert registry.counters.refused == 2
    await register(index_redis, record(epoch=3))
    await registry.poll()
    assert ids(registry) == ["w1"] and registry.refusals() == {}


async def test_stopped_leaves_at_once(index_redis: Redis) -> None:
    """A farewell is heard at the next poll, also when the worker is not in `workers` any more."""
    registry, events = registry_of(index_redis)
    await register(index_redis, record())
    await registry.poll()
    await index_redis.zrem(KEYS.workers, "w1")
    await index_redis.hset(KEYS.worker("w1"), "state", "stopped")
    await registry.poll()
    assert events.lines == ["+w1@1", "-w1"]
    assert registry.counters.leases_ended == 0


async def test_a_failure_cools_down_and_is_forgiven(index_redis: Redis) -> None:
    """Skipped for the cool-down, then tried again; a new epoch is forgiven at once."""
    registry, events = registry_of(index_redis, clock := Clock())
    await register(index_redis, record())
    await registry.poll()
    registry.report_failure("w1", epoch=1)
    registry.report_failure("nobody", epoch=1)
    clock.now += COOLDOWN_S - 0.001
    await registry.poll()
    assert ids(registry) == [] and len(registry.views()) == 1
    clock.now += 0.001
    assert ids(registry) == ["w1"]
    registry.report_failure("w1", epoch=1)
    assert ids(registry) == []
    await register(index_redis, record(epoch=2))
    await registry.poll()
    assert ids(registry) == ["w1"]
    registry.report_failure("w1", epoch=1)
    assert ids(registry) == ["w1"]
    assert events.lines == ["+w1@1", "+w1@2"]


async def test_nobody_is_judged_while_redis_is_away(own_redis: EmbeddedRedis) -> None:
    """Workers outlive an outage longer than their lease, and have one more lease to come back."""
    async with connect(own_redis.url, 0.3) as redis:
        registry, events = registry_of(redis, clock := Clock())
        await register(redis, record("w1"))
        await register(redis, record("w2"))
        await registry.poll()
        task = asyncio.create_task(registry.run())
        kill(own_redis)
        await eventually(lambda: registry.counters.failed_polls > 0)
        clock.now += 2 * LEASE_S
        failed = registry.counters.failed_polls
        await eventually(lambda: registry.counters.failed_polls > failed)
        assert ids(registry) == ["w1", "w2"]
        await asyncio.to_thread(own_redis.restart)
        await register(redis, record("w1", epoch=2))
        await eventually(lambda: "+w1@2" in events.lines)
        clock.now += LEASE_S - 0.001
        await registry.poll()
        assert ids(registry) == ["w1", "w2"]
        clock.now += 0.001
        await eventually(lambda: ids(registry) == ["w1"])
        assert events.lines == ["+w1@1", "+w2@1", "+w1@2", "-w2"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_lost_data_is_not_a_lost_worker(index_redis: Redis) -> None:
    """A record that vanishes before its lease could have ended gets a lease's time to come back."""
    registry, events = registry_of(index_redis, clock := Clock())
    await register(index_redis, record())
    await registry.poll()
    await index_redis.flushall()
    await registry.poll()
    assert ids(registry) == ["w1"]
    await register(index_redis, record())
    await registry.poll()
    await index_redis.flushall()
    await registry.poll()
    clock.now += LEASE_S - 0.001
    await registry.poll()
    assert ids(registry) == ["w1"]
    clock.now += 0.001
    await registry.poll()
    assert events.lines == ["+w1@1", "-w1"]


async def test_a_dead_worker_that_a_clock_set_back_keeps_leaves_once_and_for_all(index_redis: Redis) -> None:
    """Redis would keep its record for an hour; reading it again makes it no more alive. A renewal does."""
    registry, events = registry_of(index_redis, clock := Clock())
    await register(index_redis, record(), lease_s=3600)
    for _ in range(4):
        await registry.poll()
        clock.now += LEASE_S / 2
    for _ in range(10):
        await registry.poll()
        clock.now += LEASE_S
    assert events.lines == ["+w1@1", "-w1"]
    await register(index_redis, record(), lease_s=3601)
    await registry.poll()
    assert ids(registry) == ["w1"] and events.lines == ["+w1@1", "-w1", "+w1@1"]


async def test_an_answer_that_was_read_late_ends_no_lease(index_redis: Redis) -> None:
    """Frozen between question and answer, a router must not take its own silence for the workers'."""
    asked_and_read = iter([0.0, 0.0, 0.1, 2 * LEASE_S])
    registry, events = registry_of(index_redis, lambda: next(asked_and_read))
    await register(index_redis, record())
    await registry.poll()
    await registry.poll()
    assert events.lines == ["+w1@1"]


async def test_malformed_records_are_counted_and_ignored(index_redis: Redis) -> None:
    """Bytes of any kind in the registry concern only the id they stand under."""
    registry, _ = registry_of(index_redis)
    await register(index_redis, record("good"))
    await register(index_redis, record("liar"))
    await index_redis.hset(KEYS.worker("liar"), "worker_id", "good")
    await index_redis.zadd(KEYS.workers, {"text": 1e15, "empty": 1e15, b"\xff\xfe": 1e15, "half": 1e15})
    await index_redis.set(KEYS.worker("text"), b"\x80\x04cos\nsystem\n.")
    await index_redis.hset(KEYS.worker("half"), mapping={"worker_id": "half", "load": "[]"})
    await registry.poll()
    assert ids(registry) == ["good"]
    assert registry.counters.malformed == 3


async def test_poll_says_when_redis_is_away() -> None:
    """One poll raises; the loop does not."""
    async with connect("redis://127.0.0.1:1/0") as redis:
        registry, _ = registry_of(redis)
        with pytest.raises(RedisError):
            await registry.poll()
