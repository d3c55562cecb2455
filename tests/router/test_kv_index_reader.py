"""From a publisher's events through a real server into the mirror: the mirror equals the cache."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal

from hypothesis import given, settings
from hypothesis import strategies as st
from index_rig import KEYS, agrees, key, removed, routing, stored, worker
from redis.asyncio import Redis
from redis_fixtures import SlowProxy, connect, eventually, kill

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.index_schema import stream_id
from kvhive.proto.kv_events import KvEvent, RemovalCause
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.kv_index_reader import parse_batch
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.worker.event_delta import EventDelta
from kvhive.worker.index_calls import pack_batch

pool_events = st.lists(
    st.tuples(st.booleans(), st.integers(0, 40), st.sampled_from(list(RemovalCause)), st.integers(0, 6)),
    max_size=100,
)


@given(pool_events)
@settings(max_examples=150, deadline=None)
def test_any_events_in_any_batches_told_twice_end_in_the_held_set(
    events: list[tuple[bool, int, RemovalCause, int]],
) -> None:
    """Pool events through delta, wire encoding and mirror: what the mirror knows is what is held."""
    delta, mirror, held = EventDelta(), KvIndexMirror(), set[BlockKey]()

    def deliver(limit: int) -> None:
        parts = pack_batch(delta.take(limit))
        fields = {
            str(name).encode(): bytes(packed) for name, packed in zip(parts[::2], parts[1::2], strict=True)
        }
        for _ in range(2):  # a replayed batch changes nothing
            mirror.apply("w1", parse_batch(fields))

    for is_stored, number, cause, limit in events:
        delta.add([KvEvent(key(number), None if is_stored else cause)])
        (held.add if is_stored else held.discard)(key(number))
        if limit:
            deliver(limit)
    deliver(1000)
    assert set(mirror._slots["w1"].keys) == held == delta.held()
    assert mirror.total_blocks() == len(held)


async def test_mirrors_what_workers_hold(index_redis: Redis) -> None:
    """A router that comes late learns everything at once, then follows within milliseconds."""
    async with worker(index_redis, "w1") as w1, worker(index_redis, "w2") as w2:
        w1.add(stored(*range(9000)))
        w2.add(stored(*range(10)))
        await eventually(lambda: w1.lag_batches == w2.lag_batches == 0)
        async with routing(index_redis) as router:
            await agrees(router, w1, "w1")
            await agrees(router, w2, "w2")
            heard: list[BlockKey] = []
            router.reader.on_stored.append(lambda worker_id, keys: heard.extend(keys))
            w2.add([*removed(9, 8), *stored(77)])
            await agrees(router, w2, "w2")
            assert heard == [key(77)]
            assert router.mirror.match([key(0), key(5), key(20), key(8999)]) == {"w1": 4, "w2": 2}
            await eventually(lambda: router.mirror.staleness_s() < 0.3)
            assert router.reader.counters.resyncs == 0
            await w2.close()
            await eventually(lambda: router.mirror.block_count("w2") == 0)
            assert router.mirror.block_count("w1") == 9000


async def test_a_gap_costs_exactly_one_resync(index_redis: Redis) -> None:
    """A gap in the numbers means one snapshot of that worker alone, and no more."""
    async with worker(index_redis) as w1, worker(index_redis, "w2") as w2, routing(index_redis) as router:
        w1.add(stored(1, 2))
        w2.add(stored(3))
        await agrees(router, w1)
        await agrees(router, w2, "w2")
        cursor = router.reader._cursors["w1"]
        cursor.seq -= 1  # as if a batch had been missed
        w1.add(stored(100))
        await eventually(lambda: router.reader.counters.resyncs == 1)
        await agrees(router, w1)
        await asyncio.sleep(0.5)
        assert router.reader.counters.resyncs == 1
        assert router.reader.counters.snapshots == 3


async def test_a_trimmed_stream_costs_one_snapshot(own_redis: EmbeddedRedis) -> None:
    """Batches that are gone before the router reads them are found by their numbers."""
    async with connect(own_redis.url) as redis, worker(redis) as w1:
        w1.add(stored(1))
        async with (
            SlowProxy(own_redis.url, 0.0) as proxy,
            connect(proxy.url, 0.5) as far,
            routing(far) as router,
        ):
            await agrees(router, w1)
            proxy.delay_s = 0.4  # the router hears late
            await asyncio.sleep(0.2)
            for n in range(10, 30):
                w1.add(stored(n))
                await eventually(lambda: w1.lag_batches == 0)
                await redis.xtrim(KEYS.events("w1", w1.epoch), maxlen=1, approximate=False)
            proxy.delay_s = 0.0
            await agrees(router, w1)
            resyncs = router.reader.counters.resyncs
            assert 1 <= resyncs <= 2
            await asyncio.sleep(0.5)
            assert router.reader.counters.resyncs == resyncs


async def test_a_new_epoch_replaces_the_old_content(index_redis: Redis) -> None:
    """A restarted worker is empty for the router too, though it never said goodbye."""
    async with routing(index_redis) as router:
        async with worker(index_redis) as first:
            first.add(stored(1, 2, 3))
            await agrees(router, first)
        async with worker(index_redis) as second:
            second.add(stored(9))
            await agrees(router, second)
            assert router.reader.counters.resyncs == 1


async def test_a_crashed_server_and_everybody_recovers(own_redis: EmbeddedRedis) -> None:
    """Data lost: the mirror goes on with what it has and says how stale it is, then equals the cache."""
    async with connect(own_redis.url, 0.5) as redis, worker(redis) as w1, routing(redis) as router:
        w1.add(stored(*range(5000)))
        await agrees(router, w1)
        kill(own_redis)
        w1.add([*removed(4999), *stored(6000)])
        await eventually(lambda: router.mirror.staleness_s() > 0.5)
        assert router.mirror.block_count("w1") == 5000
        await asyncio.to_thread(own_redis.restart)
        await agrees(router, w1)
        await eventually(lambda: router.mirror.staleness_s() < 0.3)
        assert router.reader.counters.resyncs == 1
        assert [v.record.worker_id for v in router.registry.views()] == ["w1"]


async def test_a_frozen_server_costs_no_resync(own_redis: EmbeddedRedis) -> None:
    """Frozen longer than a lease and back: same epoch, nothing is read anew, nobody left."""
    async with connect(own_redis.url, 0.5) as redis, worker(redis) as w1, routing(redis) as router:
        w1.add(stored(1, 2))
        await agrees(router, w1)
        os.kill(own_redis.pid, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        w1.add(stored(3))
        os.kill(own_redis.pid, signal.SIGCONT)
        await agrees(router, w1)
        assert router.reader.counters.resyncs == 0
        assert w1.counters.resnapshots == 0
        assert router.reader.counters.snapshots == 1


async def test_canaries_are_only_bytes(index_redis: Redis) -> None:
    """Pickles and rubbish in SET and STREAM are counted, answered by one resync, never run."""

    class Canary:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, ("reader-canary-was-here",))

    async with worker(index_redis) as w1, worker(index_redis, "w2") as w2, routing(index_redis) as router:
        w1.add(stored(1))
        w2.add(stored(2))
        await agrees(router, w1)
        await agrees(router, w2, "w2")
        w1_epoch = w1.epoch
        for seq in range(2, 5):
            fields = {"stored": pickle.dumps(Canary()), "removed:because": b"x" * 16}
            await index_redis.xadd(KEYS.events("w1", w1_epoch), fields, id=stream_id(w1_epoch, seq))
        await eventually(lambda: router.reader.counters.malformed >= 1)
        # The worker finds entries that are not its own and moves to a new epoch.
        await eventually(lambda: w1.epoch > w1_epoch)
        await agrees(router, w1)
        w2.add(stored(22))
        await agrees(router, w2, "w2")
        assert router.reader.counters.resyncs <= 2
        assert "reader-canary-was-here" not in os.listdir()


async def test_keys_of_another_type_concern_only_their_worker(index_redis: Redis) -> None:
    """A stream that is no stream does not stop the reading of the others."""
    async with worker(index_redis) as w1, worker(index_redis, "w2") as w2, routing(index_redis) as router:
        w1.add(stored(1))
        w2.add(stored(2))
        await agrees(router, w1)
        await agrees(router, w2, "w2")
        await index_redis.set(KEYS.events("w1", w1.epoch), b"not a stream")
        w2.add(stored(22))
        await agrees(router, w2, "w2")
        w1.add(stored(11))
        await agrees(router, w1)


async def test_it_works_behind_a_slow_link_and_ends_when_told(
    index_redis: Redis, redis_server: EmbeddedRedis
) -> None:
    """Commands cancelled anywhere never shift answers; loops always end (checked by `running`)."""
    async with (
        worker(index_redis) as w1,
        SlowProxy(redis_server.url, 0.02) as proxy,
        connect(proxy.url) as slow,
    ):
        w1.add(stored(*range(100)))
        for n in range(25):
            async with routing(slow):
                await asyncio.sleep(0.0071 * n)
        async with routing(slow) as router:
            await agrees(router, w1)
            assert router.reader.counters.malformed == 0
