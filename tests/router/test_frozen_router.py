"""A router process that stands still (SIGSTOP) while the world goes on: when it wakes it knows how old its
view is, learns what is true with one resync at most, and leaves it at that."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from index_rig import IDENTITY, KEYS, running, stored, worker
from lone_processes import LONE_LEASE_S, LoneRouter, lone_router
from redis.asyncio import Redis
from redis_fixtures import eventually
from worker_records import record
from worker_rig import WorkerRig, running_worker

from kvhive.proto.block_hash import block_key
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.worker.kv_event_publisher import KvEventPublisher

POOL_BLOCKS = 120
PROMPTS = 200


def held_by(rig: WorkerRig) -> set[bytes]:
    """The worker's real cache."""
    return {block_key(block_hash) for block_hash in list(rig.pool._by_hash)}


async def serve(rig: WorkerRig, first: int, count: int) -> None:
    """Let it compute distinct prompts of three blocks, as another router might."""
    for n in range(first, first + count):
        await rig.generate(rig.request(f"r{n}", [n % 900, *divmod(n, 30), *range(10)], 1))


async def wakes(router: LoneRouter, frozen_at: float) -> None:
    """It goes on, and knows at once for how long it was away, unless it has already read on."""
    woken_at = time.monotonic()
    os.kill(router.process.pid, signal.SIGCONT)
    known = await router.knowledge(since=woken_at)
    assert known.staleness_s > 0.9 * (woken_at - frozen_at) or known.staleness_s < known.at - woken_at


@pytest.mark.parametrize(("kept_batches", "resyncs"), [(1024, 0), (16, 1)], ids=["within", "beyond"])
async def test_a_router_frozen_while_its_worker_serves_two_hundred_prompts(
    redis_server: EmbeddedRedis,
    index_redis: Redis,
    monkeypatch: pytest.MonkeyPatch,
    kept_batches: int,
    resyncs: int,
) -> None:
    """The pool is turned over five times. Within the stream's length the router reads on; beyond it that
    costs one snapshot, and not another one afterwards."""
    monkeypatch.setattr("kvhive.worker.index_calls.STREAM_MAX_BATCHES", kept_batches)
    await index_redis.config_set("stream-node-max-entries", 8)
    async with running_worker(blocks=POOL_BLOCKS) as rig, lone_router(redis_server.url) as router:
        registration = record(epoch=0, model_identity=IDENTITY)
        publisher = KvEventPublisher(
            index_redis, KEYS, registration, LONE_LEASE_S, 0.1, lambda: rig.engine.load
        )
        rig.on_events(publisher.add)
        async with running(publisher):
            await serve(rig, 0, 20)
            before = await router.learns(w1=held_by(rig))
            os.kill(router.process.pid, signal.SIGSTOP)
            frozen_at = time.monotonic()
            await serve(rig, 20, PROMPTS)
            await asyncio.sleep(max(0.0, frozen_at + 1.5 * LONE_LEASE_S - time.monotonic()))
            await eventually(lambda: publisher.lag_batches == 0)
            published = publisher.counters.published_batches
            assert published > 40, "else there is nothing to be missed"
            await wakes(router, frozen_at)
            known = await router.learns(w1=held_by(rig))
            assert known.resyncs - before.resyncs == resyncs
            await asyncio.sleep(1.0)
            await serve(rig, 20 + PROMPTS, 5)
            later = await router.learns(w1=held_by(rig))
            assert (later.resyncs, later.leases_ended) == (known.resyncs, 0)


async def test_while_it_stood_still_one_worker_began_anew_and_another_one_left(
    redis_server: EmbeddedRedis, index_redis: Redis
) -> None:
    async with lone_router(redis_server.url) as router, worker(index_redis, lease_s=LONE_LEASE_S) as w1:
        w1.add(stored(*range(1, 1001)))
        async with worker(index_redis, "w2") as first, worker(index_redis, "w3") as gone:
            first.add(stored(*range(1, 501)))
            gone.add(stored(*range(1, 301)))
            await router.learns(w1=w1.held(), w2=first.held(), w3=gone.held())
            os.kill(router.process.pid, signal.SIGSTOP)
            frozen_at = time.monotonic()
        async with worker(index_redis, "w2", lease_s=LONE_LEASE_S) as second:
            second.add(stored(1, 2))
            w1.add(stored(2000))
            await asyncio.sleep(1.5 * LONE_LEASE_S)
            await wakes(router, frozen_at)
            await router.learns(w1=w1.held(), w2=second.held())
