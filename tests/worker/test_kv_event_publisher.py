"""The publisher against real servers: what is in the index is what the worker holds, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis_fixtures import SlowProxy, connect, eventually, kill

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.index_schema import IndexKeys, LoadReport, WorkerRecord, WorkerState, stream_id
from kvhive.proto.kv_events import KvEvent, RemovalCause, unpack_keys
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.worker.event_delta import EventDelta
from kvhive.worker.kv_event_publisher import KvEventPublisher

KEYS = IndexKeys("test")
LEASE_S = 2.0


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def stored(*numbers: int) -> list[KvEvent]:
    return [KvEvent(key(n)) for n in numbers]


def removed(*numbers: int) -> list[KvEvent]:
    return [KvEvent(key(n), RemovalCause.EVICTED) for n in numbers]


def record(worker_id: str = "w1") -> WorkerRecord:
    return WorkerRecord(
        worker_id, "127.0.0.1:1", 0, "demo", "ab" * 32, 16, 2048, 49152, WorkerState.STARTING, "cpu", 1
    )


@contextlib.asynccontextmanager
async def publishing(
    redis: Redis, lease_s: float = LEASE_S, close: bool = True, heartbeat_s: float = 0.1
) -> AsyncIterator[KvEventPublisher]:
    publisher = KvEventPublisher(redis, KEYS, record(), lease_s, heartbeat_s, LoadReport)
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        if close:
            await publisher.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def in_redis(redis: Redis, publisher: KvEventPublisher) -> set[bytes]:
    return set(await redis.smembers(KEYS.blocks("w1", publisher.epoch)))


async def agrees(redis: Redis, publisher: KvEventPublisher, timeout_s: float = 5.0) -> None:
    async def check() -> bool:
        return publisher.lag_batches == 0 and await in_redis(redis, publisher) == publisher.held()

    await eventually(check, timeout_s)


async def replay(redis: Redis, publisher: KvEventPublisher) -> set[bytes]:
    """What a reader of the stream alone would believe; also checks that the numbering has no gap."""
    known: set[bytes] = set()
    for number, (entry_id, fields) in enumerate(
        await redis.xrange(KEYS.events("w1", publisher.epoch)), start=1
    ):
        assert entry_id.decode() == stream_id(publisher.epoch, number)
        for field, packed in fields.items():
            keys = unpack_keys(packed)
            known = known | set(keys) if field == b"stored" else known - set(keys)
    return known


# A pool whose blocks form a chain tree: block n's parent is n // 2. Leaves go first, as in the real one.
actions = st.lists(
    st.tuples(st.sampled_from(["store", "evict", "clear", "take"]), st.integers(1, 31)), max_size=120
)


@given(actions)
@settings(max_examples=200, deadline=None)
def test_delta_collapses_to_the_truth_and_stays_prefix_closed(steps: list[tuple[str, int]]) -> None:
    """Whatever happens and wherever batches are cut, the index converges, and no block lacks its parent."""
    delta, held, index = EventDelta(), set[int](), set[bytes]()
    for action, n in steps:
        if action == "store" and (n == 1 or n // 2 in held):
            held.add(n)
            delta.add(stored(n))
        elif action == "evict" and not {2 * n, 2 * n + 1} & held:
            held.discard(n)
            delta.add(removed(n))
        elif action == "clear":
            delta.add(removed(*sorted(held, reverse=True)))
            held.clear()
        elif action == "take":
            batch = delta.take(max(1, n // 6))
            assert not set(batch.stored) & set(batch.removed_keys())
            index = (index | set(batch.stored)) - set(batch.removed_keys())
            numbers = {int.from_bytes(k, "big") for k in index}
            assert all(m == 1 or m // 2 in numbers for m in numbers)
        assert delta.held() == {key(m) for m in held}
        assert delta.pending <= len(index | {key(m) for m in held})
    batch = delta.take(1000)
    assert (index | set(batch.stored)) - set(batch.removed_keys()) == delta.held()
    delta.restart()
    assert set(delta.take(1000).stored) == delta.held()


async def test_registers_and_publishes_at_once(index_redis: Redis) -> None:
    """The record, the lease, the SET and the STREAM appear, all with an expiry; no batch waits for a beat."""
    async with publishing(index_redis, lease_s=60, heartbeat_s=30) as publisher:
        await publisher.set_state(WorkerState.SERVING)
        raw = await index_redis.hgetall(KEYS.worker("w1"))
        assert WorkerRecord.from_fields(raw).state is WorkerState.SERVING
        assert WorkerRecord.from_fields(raw).epoch == publisher.epoch
        seconds, _ = await index_redis.time()
        assert abs(publisher.epoch / 1000 - seconds) < 5
        deadline = await index_redis.zscore(KEYS.workers, "w1")
        assert 0 < deadline / 1000 - seconds <= 60 + 1
        for n in range(20):
            publisher.add(stored(n))
            await agrees(index_redis, publisher)  # within its 5 s; the next heartbeat is 30 s away
        for name in await index_redis.keys("*"):
            assert name == KEYS.workers.encode() or 0 < await index_redis.pttl(name) <= 4000 * 60
        assert await replay(index_redis, publisher) == publisher.held()


async def test_duplicates_change_nothing(index_redis: Redis) -> None:
    """Events told twice, and blocks that come and go at once, leave the count right."""
    async with publishing(index_redis) as publisher:
        publisher.add([*stored(1, 2, 2, 3), *removed(3), *removed(3), *stored(1), *removed(9)])
        await agrees(index_redis, publisher)
        assert publisher.held() == {key(1), key(2)}
        assert await replay(index_redis, publisher) == {key(1), key(2)}


async def test_a_cleared_cache_is_told_without_traffic(index_redis: Redis) -> None:
    """The removal with its cause arrives although nothing else happens."""
    async with publishing(index_redis) as publisher:
        publisher.add(stored(*range(10)))
        await agrees(index_redis, publisher)
        publisher.add(KvEvent(key(n), RemovalCause.CLEARED) for n in range(10))
        await agrees(index_redis, publisher)
        last = (await index_redis.xrevrange(KEYS.events("w1", publisher.epoch), count=1))[0][1]
        assert set(unpack_keys(last[b"removed:cleared"])) == {key(n) for n in range(10)}


async def test_events_from_another_thread(index_redis: Redis) -> None:
    """The engine's thread adds while the loop publishes, in batches that no key is missing from."""
    async with publishing(index_redis) as publisher:

        def engine() -> None:
            for step in range(300):
                publisher.add(stored(*range(step * 40, step * 40 + 40)))
                publisher.add(removed(*range(step * 40 + 10, step * 40 + 20)))

        thread = threading.Thread(target=engine)
        thread.start()
        await asyncio.to_thread(thread.join)
        await agrees(index_redis, publisher)
        assert len(publisher.held()) == 300 * 30
        assert await replay(index_redis, publisher) == publisher.held()
        assert publisher.counters.resnapshots == 0


async def test_a_killed_and_empty_server_gets_everything_again(own_redis: EmbeddedRedis) -> None:
    """After a crash with loss of all data the index equals the cache again, under a new epoch."""
    async with connect(own_redis.url) as redis, publishing(redis) as publisher:
        publisher.add(stored(*range(6000)))
        await agrees(redis, publisher)
        before = publisher.epoch
        kill(own_redis)
        publisher.add([*removed(*range(5999, 5000, -1)), *stored(*range(7000, 7100))])
        await eventually(lambda: publisher.counters.retries > 1)
        await asyncio.to_thread(own_redis.restart)
        await eventually(lambda: publisher.epoch > before)
        await agrees(redis, publisher)
        assert len(publisher.held()) == 5001 + 100
        assert publisher.counters.resnapshots == 1
        assert await replay(redis, publisher) == publisher.held()


async def test_a_flushed_server_is_noticed_while_idle(index_redis: Redis) -> None:
    """Data lost without any lost connection is found by the next heartbeat."""
    async with publishing(index_redis) as publisher:
        publisher.add(stored(1, 2, 3))
        await agrees(index_redis, publisher)
        await index_redis.flushall()
        await agrees(index_redis, publisher)
        assert len(publisher.held()) == 3


async def test_a_frozen_server_costs_only_freshness(own_redis: EmbeddedRedis) -> None:
    """SIGSTOP for 3 s, longer than the lease: adding never blocks; afterwards nothing is published twice."""
    async with connect(own_redis.url, timeout_s=0.5) as redis, publishing(redis) as publisher:
        publisher.add(stored(*range(100)))
        await agrees(redis, publisher)
        epoch = publisher.epoch
        os.kill(own_redis.pid, signal.SIGSTOP)
        start = time.monotonic()
        while time.monotonic() - start < 3:
            publisher.add(stored(*range(100, 200)))
            publisher.add(removed(*range(199, 150, -1)))
            await asyncio.sleep(0.01)
        assert publisher.lag_batches <= 2
        os.kill(own_redis.pid, signal.SIGCONT)
        await agrees(redis, publisher)
        assert publisher.epoch == epoch
        assert publisher.counters.resnapshots == 0
        assert await replay(redis, publisher) == publisher.held()
        await eventually(lambda: redis.exists(KEYS.worker("w1")))


async def test_a_batch_whose_answer_was_lost_is_not_applied_twice(index_redis: Redis) -> None:
    """A retry that finds its own id on top is done; numbering goes on without a gap."""
    async with publishing(index_redis) as publisher:
        publisher.add(stored(1))
        await agrees(index_redis, publisher)
        await index_redis.client_pause(400, all=True)
        publisher.add(stored(2, 3))
        await asyncio.sleep(0.1)
        # Cut the connection while the script waits: it may or may not run, and nobody hears of it.
        await index_redis.connection_pool.disconnect()
        await agrees(index_redis, publisher)
        assert await replay(index_redis, publisher) == publisher.held()
        assert publisher.counters.resnapshots == 0


async def test_a_zombie_is_refused_and_stays_silent(index_redis: Redis) -> None:
    """A worker that was frozen while its replacement registered writes nothing more, nor deregisters it."""
    async with publishing(index_redis, close=False) as zombie:
        zombie.add(stored(1, 2))
        await agrees(index_redis, zombie)
        async with publishing(index_redis) as successor:
            await eventually(lambda: successor.epoch > zombie.epoch)
            zombie.add(stored(3))
            successor.add(stored(7))
            await agrees(index_redis, successor)
            await eventually(lambda: zombie.counters.fenced == 1)
            await asyncio.sleep(0.5)
            raw = await index_redis.hgetall(KEYS.worker("w1"))
            assert int(raw[b"epoch"]) == successor.epoch
            assert await index_redis.exists(KEYS.blocks("w1", zombie.epoch)) == 0
            assert successor.counters.fenced == 0
            await zombie.close()
            assert await index_redis.exists(KEYS.worker("w1"))


async def test_a_foreign_write_into_the_stream_means_a_new_epoch(index_redis: Redis) -> None:
    """A canary entry with a larger id is only bytes; the worker moves on to keys of its own."""

    class Canary:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, ("canary-was-here",))

    async with publishing(index_redis) as publisher:
        publisher.add(stored(1))
        await agrees(index_redis, publisher)
        epoch = publisher.epoch
        await index_redis.xadd(KEYS.events("w1", epoch), {"stored": pickle.dumps(Canary())})
        publisher.add(stored(2))
        await eventually(lambda: publisher.epoch > epoch)
        await agrees(index_redis, publisher)
        await index_redis.delete(KEYS.blocks("w1", publisher.epoch))
        await index_redis.set(KEYS.blocks("w1", publisher.epoch), b"not a set")
        await asyncio.sleep(0.3)
        await agrees(index_redis, publisher)
        assert "canary-was-here" not in os.listdir()


async def test_a_full_redis_keeps_the_lease_and_recovers(own_redis: EmbeddedRedis) -> None:
    """Out of memory for longer than a lease, the worker stays registered; then it catches up."""
    async with connect(own_redis.url) as redis, publishing(redis, lease_s=1.0) as publisher:
        publisher.add(stored(*range(5000)))
        await agrees(redis, publisher)
        await redis.config_set("maxmemory", 1_000_000)
        publisher.add(stored(*range(10_000, 15_000)))
        await eventually(lambda: publisher.counters.retries > 0)
        for _ in range(20):
            assert await redis.exists(KEYS.worker("w1"))
            await asyncio.sleep(0.1)
        assert await redis.zscore(KEYS.workers, "w1") is not None
        await redis.config_set("maxmemory", 0)
        await agrees(redis, publisher)
        assert len(publisher.held()) == 10_000
        assert publisher.counters.resnapshots == 0


async def test_the_stream_is_trimmed(index_redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream keeps about the documented number of batches, however many were published."""
    monkeypatch.setattr("kvhive.worker.index_calls.STREAM_MAX_BATCHES", 10)
    monkeypatch.setattr("kvhive.worker.kv_event_publisher.PUBLISH_INTERVAL_S", 0.0)
    await index_redis.config_set("stream-node-max-entries", 5)
    async with publishing(index_redis) as publisher:
        for n in range(60):
            publisher.add(stored(n))
            await agrees(index_redis, publisher)
        assert await index_redis.xlen(KEYS.events("w1", publisher.epoch)) < 20
        assert len(await in_redis(index_redis, publisher)) == 60


async def test_close_leaves_only_a_farewell_that_expires(index_redis: Redis) -> None:
    """Deregistration takes the lease and the blocks at once; closing twice is fine."""
    async with publishing(index_redis) as publisher:
        publisher.add(stored(1))
        await agrees(index_redis, publisher)
        await publisher.close()
        await publisher.close()
        assert await index_redis.keys("*") == [KEYS.worker("w1").encode()]
        raw = await index_redis.hgetall(KEYS.worker("w1"))
        assert WorkerRecord.from_fields(raw).state is WorkerState.STOPPED
        assert 0 < await index_redis.pttl(KEYS.worker("w1")) <= 1000 * LEASE_S


async def test_a_killed_worker_is_swept(index_redis: Redis) -> None:
    """A worker that never says goodbye leaves no key behind; another one sweeps its lease."""
    async with publishing(index_redis, lease_s=0.3, close=False) as dead:
        dead.add(stored(1))
        await agrees(index_redis, dead)
    other = KvEventPublisher(index_redis, KEYS, record("w2"), LEASE_S, 0.1, LoadReport)
    task = asyncio.create_task(other.run())

    async def gone() -> bool:
        return not any(b"w1" in name for name in await index_redis.keys("*"))

    await eventually(gone)
    assert await index_redis.zrange(KEYS.workers, 0, -1) == [b"w2"]
    await other.close()
    await asyncio.wait_for(task, 1)


async def test_without_a_server_everything_is_bounded(tmp_path: Path) -> None:
    """No Redis at all: states and events are taken, closing ends within its limit."""
    async with connect("redis://127.0.0.1:1/0") as redis, publishing(redis) as publisher:
        for _ in range(50):
            publisher.add([*stored(*range(1000)), *removed(*range(999, -1, -1))])
        start = time.monotonic()
        await publisher.set_state(WorkerState.SERVING)
        assert publisher.lag_batches == 0
        assert publisher.counters.retries > 0
        await publisher.close()
        assert time.monotonic() - start < 4


async def test_cancelled_commands_never_shift_answers(
    redis_server: EmbeddedRedis, index_redis: Redis
) -> None:
    """Behind a slow proxy, conversations cancelled anywhere leave no unread answer to the next."""
    async with SlowProxy(redis_server.url, 0.03) as proxy, connect(proxy.url) as slow:
        async with publishing(slow) as publisher:

            async def cancelled(n: int) -> None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(n * 0.002):
                        await slow.echo(f"stranger {n}")

            for round_ in range(5):
                publisher.add(stored(*range(round_ * 10, round_ * 10 + 10)))
                await asyncio.gather(*(cancelled(n) for n in range(20)))
                assert await slow.echo("mine") == b"mine"
            await agrees(index_redis, publisher)
            assert publisher.counters.resnapshots == 0
        # Cancelling the publisher itself in the middle of a command leaves the client usable, too.
        # (Moments chosen so that some fall into a send, where Python 3.11 loses cancellations.)
        for n in range(30):
            start = time.monotonic()
            async with publishing(slow, close=False) as cut_short:
                cut_short.add(stored(n))
                await asyncio.sleep(0.0037 * n)
            assert time.monotonic() - start < 5, "a lost cancellation would never end"
            assert await slow.echo(f"after {n}") == f"after {n}".encode()
