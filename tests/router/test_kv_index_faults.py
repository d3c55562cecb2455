"""What happens to the index when somebody lies, a clock jumps, data is lost or a router is frozen: afterwards
nobody is believed to hold more than it does, and it takes no longer than is said here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time

import pytest
from index_rig import IDENTITY, KEYS, LEASE_S, agrees, key, routing, stored, worker
from redis.asyncio import Redis
from redis_fixtures import eventually

from kvhive.proto.index_schema import KEYS_PER_BATCH, LoadReport, stream_id
from kvhive.scripts.embedded_redis import EmbeddedRedis

HOUR_MS = 3_600_000
RECOVERY_S = 10 * LEASE_S
"""Far above the bound of two leases and a poll, for machines that are busy."""


async def test_a_worker_is_believed_no_more_than_its_pool_can_hold(index_redis: Redis) -> None:
    """What it publishes beyond that costs the router no memory, is counted, and can still be taken back."""
    load = LoadReport(blocks_total=100, blocks_free=100)
    async with worker(index_redis, load=load) as w1, routing(index_redis) as router:
        await eventually(lambda: bool(router.registry.views()))
        w1.add(stored(*range(3 * KEYS_PER_BATCH)))
        await eventually(lambda: w1.lag_batches == 0 and router.mirror.refused_keys > 0, RECOVERY_S)
        await eventually(lambda: router.mirror.block_count("w1") == 100 + KEYS_PER_BATCH, RECOVERY_S)
        assert router.mirror.distinct_blocks() == 100 + KEYS_PER_BATCH


async def test_a_batch_that_is_too_large_is_not_read(index_redis: Redis) -> None:
    """It is counted, and answered by a snapshot, which is bounded by the pool."""
    async with worker(index_redis) as w1, routing(index_redis) as router:
        w1.add(stored(1))
        await agrees(router, w1)
        huge = b"".join(key(n) for n in range(KEYS_PER_BATCH + 1))
        await index_redis.xadd(KEYS.events("w1", w1.epoch), {"stored": huge}, id=stream_id(w1.epoch, 2))
        await eventually(lambda: router.reader.counters.malformed >= 1, RECOVERY_S)
        await agrees(router, w1)
        assert router.mirror.block_count("w1") == 1


async def test_a_flushed_redis(index_redis: Redis) -> None:
    """Within a heartbeat the worker tells everything anew; the router never believes more than was true."""
    async with worker(index_redis) as w1, routing(index_redis) as router:
        w1.add(stored(*range(1, 500)))
        await agrees(router, w1)
        epoch, chain = w1.epoch, [key(n) for n in range(1, 1000)]
        await index_redis.flushall()
        deadline = time.monotonic() + RECOVERY_S
        while w1.epoch == epoch or router.knows("w1") != w1.held():
            assert router.mirror.match(chain).get("w1", 0) <= 499
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        assert router.mirror.match(chain) == {"w1": 499}


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS], ids=["set back", "set forward"])
async def test_the_clock_of_redis_jumps_by_an_hour(index_redis: Redis, jump_ms: int) -> None:
    """Set back, every expiry lies an hour away, and a worker that dies then would seem to live that long; set
    forward, everything expires at once. The living stay or come back, the dead leave within two leases."""
    async with worker(index_redis, "w1") as w1, routing(index_redis) as router:
        async with worker(index_redis, "w2") as w2:
            w1.add(stored(1, 2))
            w2.add(stored(1))
            await agrees(router, w1, "w1")
            await agrees(router, w2, "w2")
        # w2 has died without a word. What a jump does to the keys, without touching anybody's clock:
        for name in await index_redis.keys("*"):
            await index_redis.pexpire(name, max(1, await index_redis.pttl(name) + jump_ms))
        for member, deadline in await index_redis.zrange(KEYS.workers, 0, -1, withscores=True):
            await index_redis.zadd(KEYS.workers, {member: deadline + jump_ms})
        await eventually(lambda: router.mirror.block_count("w2") == 0, RECOVERY_S)
        await agrees(router, w1, "w1")
        assert [v.record.worker_id for v in router.registry.views()] == ["w1"]


FROZEN = """
import asyncio, json, sys
from kvhive.proto.index_schema import IndexKeys
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.kv_index_reader import KvIndexReader
from kvhive.router.redis_connection import open_redis
from kvhive.router.worker_registry import ModelSpec, WorkerRegistry

async def main(url, cluster, identity):
    redis, keys = open_redis(url, 1.0), IndexKeys(cluster)
    registry = WorkerRegistry(redis, keys, ModelSpec(identity, 16), 1.0, 1.0, poll_s=0.05)
    mirror = KvIndexMirror()
    loops = asyncio.gather(registry.run(), KvIndexReader(redis, keys, registry, mirror).run())
    chain = [n.to_bytes(16, "big") for n in range(1, 2000)]
    while not loops.done():
        age = mirror.staleness_s()
        print(json.dumps([mirror.match(chain), mirror.total_blocks(), min(age, 1e9)]), flush=True)
        await asyncio.sleep(0.02)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_router_that_was_frozen(index_redis: Redis, redis_server: EmbeddedRedis) -> None:
    """While it stood still a worker began anew and another's stream was trimmed; when it goes on it knows at
    once how old its view is, and soon what is true."""
    router = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", FROZEN, redis_server.url, "test", IDENTITY, stdout=asyncio.subprocess.PIPE
    )
    assert router.stdout is not None

    async def hears(matches: dict[str, int], blocks: int) -> None:
        async with asyncio.timeout(30):
            while json.loads(await router.stdout.readline())[:2] != [matches, blocks]:  # type: ignore[union-attr]
                pass

    try:
        async with worker(index_redis, "w1") as w1:
            async with worker(index_redis, "w2") as w2:
                w1.add(stored(*range(1, 1001)))
                w2.add(stored(*range(1, 501)))
                await hears({"w1": 1000, "w2": 500}, 1500)
                os.kill(router.pid, signal.SIGSTOP)
            async with worker(index_redis, "w2") as w2:
                w2.add(stored(1, 2))
                for n in range(1001, 1011):
                    w1.add(stored(n))
                    await eventually(lambda: w1.lag_batches == 0)
                await index_redis.xtrim(KEYS.events("w1", w1.epoch), maxlen=1, approximate=False)
                await asyncio.sleep(1.0)
                os.kill(router.pid, signal.SIGCONT)
                await hears({"w1": 1010, "w2": 2}, 1012)
    finally:
        router.kill()
        await router.wait()
