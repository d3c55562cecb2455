"""A Redis that says no, goes back in time, or is slower to read than to write: nobody is dropped for it,
nothing is believed that is not so, and no snapshot leads to the next."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable

import pytest
from index_rig import KEYS, LEASE_S, Router, agrees, key, removed, routing, running, stored, worker
from redis.asyncio import Redis
from redis_fixtures import connect, eventually, kill
from worker_records import SPEC

from kvhive.proto.index_schema import stream_id
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.kv_index_reader import KvIndexReader, _Cursor
from kvhive.router.kv_index_redis import KvIndexRedis
from kvhive.router.worker_registry import WorkerRegistry
from kvhive.scripts.embedded_redis import EmbeddedRedis

RECOVERY_S = 10 * LEASE_S


@contextlib.asynccontextmanager
async def busy(redis: Redis) -> AsyncIterator[None]:
    """Somebody's script runs for long: all else is answered with BUSY."""
    await redis.config_set("lua-time-limit", 20)
    script = asyncio.create_task(redis.eval("while true do end", 0))
    try:
        yield
    finally:
        async with connect(url_of(redis)) as other:
            await other.script_kill()
        await asyncio.gather(script, return_exceptions=True)


@contextlib.asynccontextmanager
async def without_a_master(redis: Redis) -> AsyncIterator[None]:
    """A replica that cannot reach its master says MASTERDOWN to everything, until it becomes one itself."""
    await redis.config_set("replica-serve-stale-data", "no")
    await redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        yield
    finally:
        await redis.execute_command("REPLICAOF", "NO", "ONE")
        await redis.config_set("replica-serve-stale-data", "yes")


@contextlib.asynccontextmanager
async def read_only(redis: Redis) -> AsyncIterator[None]:
    """A master that was made a replica of another one, which is not there yet: it still answers questions."""
    await redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        yield
    finally:
        await redis.execute_command("REPLICAOF", "NO", "ONE")


def url_of(redis: Redis) -> str:
    known = redis.connection_pool.connection_kwargs
    return f"redis://:{known['password']}@{known['host']}:{known['port']}/0"


@pytest.mark.parametrize("refusing", [busy, without_a_master, read_only])
async def test_a_server_that_refuses_for_a_moment_costs_nobody_a_snapshot(
    own_redis: EmbeddedRedis, refusing: Callable[[Redis], contextlib.AbstractAsyncContextManager[None]]
) -> None:
    """As in a failover that lost nothing. What it says concerns all keys, and is no reason to give one up."""
    async with (
        connect(own_redis.url, 5.0) as operators,
        connect(own_redis.url) as redis,
        worker(redis, lease_s=30.0) as w1,
        routing(redis, lease_s=30.0) as router,
    ):
        w1.add(stored(*range(1, 300)))
        await agrees(router, w1)
        chain = [key(n) for n in range(1, 300)]
        async with refusing(operators):
            w1.add(stored(300))
            await eventually(lambda: w1.counters.retries > 1)
            for _ in range(20):
                assert router.mirror.match(chain) == {"w1": 299}
                await asyncio.sleep(0.01)
        await agrees(router, w1)
        assert (w1.counters.resnapshots, router.reader.counters.resyncs) == (0, 0)
        assert (router.reader.counters.snapshots, router.reader.counters.malformed) == (1, 0)
        await eventually(lambda: router.mirror.staleness_s() < 0.5)


async def test_a_redis_that_takes_no_writes_for_several_leases_costs_no_worker(
    own_redis: EmbeddedRedis,
) -> None:
    """All leases end, since nobody can renew one, which the router can see: it goes on as it was."""
    async with (
        connect(own_redis.url, 5.0) as operators,
        connect(own_redis.url) as redis,
        worker(redis) as w1,
        routing(redis) as router,
    ):
        w1.add(stored(1, 2))
        await agrees(router, w1)
        async with read_only(operators):
            await asyncio.sleep(2.5 * LEASE_S)
            assert [v.record.worker_id for v in router.registry.routable(router.registry.clock())] == ["w1"]
            assert router.registry.counters.failed_polls > 0
        w1.add(stored(3))
        await agrees(router, w1)
        await asyncio.sleep(1.5 * LEASE_S)
        assert router.registry.counters.leases_ended == 0


async def test_one_unreadable_worker_does_not_make_the_others_stale(index_redis: Redis) -> None:
    """Its keys are of another type, and nobody mends them: the rest of the index stays as fresh as it is."""
    async with worker(index_redis, "w2") as w2, routing(index_redis) as router:
        async with worker(index_redis, "w1", lease_s=60.0) as w1:
            w1.add(stored(1))
            w2.add(stored(2))
            await agrees(router, w1, "w1")
            await agrees(router, w2, "w2")
        await index_redis.set(KEYS.events("w1", w1.epoch), b"not a stream")
        await eventually(lambda: router.reader.counters.malformed > 0)
        await asyncio.sleep(0.3)
        assert router.mirror.staleness_s() < 0.3
        assert (router.mirror.block_count("w1"), router.mirror.block_count("w2")) == (0, 1)


async def keys_and_values(redis: Redis) -> dict[bytes, tuple[bytes, int]]:
    """What a replica or a dump of this moment has."""
    return {name: (await redis.dump(name), await redis.pttl(name)) for name in await redis.keys("*")}


async def go_back_to(redis: Redis, then: dict[bytes, tuple[bytes, int]]) -> None:
    """Let the server have what it had then and nothing else, at once."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.flushall()
        for name, (value, expires_ms) in then.items():
            pipe.restore(name, max(1, expires_ms), value)
        await pipe.execute()


@pytest.mark.parametrize("epochs_between", [0, 1, 2])
async def test_a_redis_that_goes_back_in_time(index_redis: Redis, epochs_between: int) -> None:
    """Its streams end earlier than what both ends know, or belong to an epoch that is over. No batch is taken
    for one that came before: a new epoch and a snapshot, within a heartbeat, and one only."""
    async with worker(index_redis) as w1, routing(index_redis) as router:
        w1.add(stored(*range(1, 200)))
        await agrees(router, w1)
        then = await keys_and_values(index_redis)
        for number in range(epochs_between):
            epoch = w1.epoch
            await index_redis.flushall()
            await eventually(lambda: w1.epoch > epoch, RECOVERY_S)  # noqa: B023
            w1.add(stored(500 + number))
            await agrees(router, w1)
        for n in range(10):
            w1.add([*removed(199 - n), *stored(1000 + n)])
            await agrees(router, w1)
        epoch, resyncs = w1.epoch, router.reader.counters.resyncs
        await go_back_to(index_redis, then)
        w1.add(stored(2000))
        await eventually(lambda: w1.epoch > epoch, RECOVERY_S)
        await agrees(router, w1)
        assert router.mirror.match([key(n) for n in range(1, 300)]) == {"w1": 189}
        await asyncio.sleep(0.5)
        assert w1.epoch == router.registry.views()[0].record.epoch
        # A read in between of the epoch that came back is one more.
        assert router.reader.counters.resyncs - resyncs <= 1 + (epochs_between > 0)


async def test_a_worker_restarted_at_its_address_between_two_looks_is_another_one(index_redis: Redis) -> None:
    """The registry never saw it go. What it held before is not claimed once the new epoch is known, although
    nobody said goodbye, and although both have batches of the same numbers."""
    async with routing(index_redis) as router:
        joined: list[int] = []
        router.registry.on_join.append(lambda record: joined.append(record.epoch))
        async with worker(index_redis) as first:
            for n in range(1, 6):
                first.add(stored(n))
                await agrees(router, first)
        async with worker(index_redis) as second:
            for n in range(101, 104):
                second.add(stored(n))
                await agrees(router, second)
            assert joined == [first.epoch, second.epoch] and second.epoch > first.epoch
            assert router.mirror.match([key(1)]) == {} and router.mirror.match([key(101)]) == {"w1": 1}
            assert router.mirror.distinct_blocks() == 3 or router.mirror.sweep() is False
            assert router.registry.counters.leases_ended == 0


class Crowded(KvIndexReader):
    """While it reads one worker's snapshot, the others go on as far as their streams are long."""

    meanwhile: Callable[[], object]

    async def _snapshot(self, worker_id: str, cursor: _Cursor) -> None:
        await super()._snapshot(worker_id, cursor)
        await self.meanwhile()  # type: ignore[misc]


async def test_many_snapshots_do_not_lead_to_more_of_them(index_redis: Redis) -> None:
    """A router starts beside eight busy workers, whose streams are shorter than eight snapshots take; each
    is read between two of them. Otherwise all would have gaps by then, and so on for ever."""
    numbers, kept = itertools.count(1), 30
    registry = WorkerRegistry(index_redis, KEYS, SPEC, LEASE_S, 1.0, poll_s=0.05)
    mirror = KvIndexMirror()
    reader = Crowded(index_redis, KEYS, registry, mirror)
    router = Router(registry, mirror, reader)
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(worker(index_redis, f"w{i}")) for i in range(8)]

        async def meanwhile() -> None:
            for _ in range(20):
                for each in workers:
                    each.add(stored(next(numbers)))
                await eventually(lambda: all(each.lag_batches == 0 for each in workers))
            for i, each in enumerate(workers):
                await index_redis.xtrim(KEYS.events(f"w{i}", each.epoch), maxlen=kept, approximate=False)

        reader.meanwhile = meanwhile
        await meanwhile()
        await registry.poll()
        await stack.enter_async_context(running(registry, reader))
        for i, each in enumerate(workers):
            await agrees(router, each, f"w{i}")
        assert (reader.counters.snapshots, reader.counters.resyncs) == (8, 0)


async def test_a_stream_that_skips_numbers_is_never_applied(index_redis: Redis) -> None:
    """Somebody else's batch, which would be believed if only its id had to be larger."""
    async with worker(index_redis) as w1, routing(index_redis) as router:
        w1.add(stored(1))
        await agrees(router, w1)
        events = KEYS.events("w1", w1.epoch)
        await index_redis.xadd(events, {"stored": key(7)}, id=stream_id(w1.epoch, 5))
        await eventually(lambda: router.reader.counters.resyncs > 0, RECOVERY_S)
        await agrees(router, w1)
        assert router.mirror.match([key(7)]) == {}


async def test_a_look_up_that_fails_answers_nothing_rather_than_what_was_so_before(
    own_redis: EmbeddedRedis,
) -> None:
    """Nobody knows how old the last answer to the same prompt is; the limit on staleness is not about it."""
    async with connect(own_redis.url, 0.5) as redis, worker(redis) as w1:
        w1.add(stored(1, 2, 3))
        await eventually(lambda: w1.epoch > 0 and w1.lag_batches == 0)
        registry = WorkerRegistry(redis, KEYS, SPEC, LEASE_S, 1.0)
        index, chain = KvIndexRedis(redis, KEYS, registry), [key(1), key(2), key(3)]
        await registry.poll()
        await index.prepare(chain)
        assert index.match(chain) == {"w1": 3}
        kill(own_redis)
        await index.prepare(chain)
        assert (index.counters.failures, index.match(chain)) == (1, {})
        index._answers[chain[-1], 3] = {("w1", w1.epoch): 3}
        await index.prepare(chain)
        assert (index.counters.skipped, index.match(chain)) == (1, {})
