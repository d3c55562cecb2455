"""What happens to the index when somebody lies or data is lost: nobody is believed to hold more than it
does, and that takes no longer than is said here."""

from __future__ import annotations

import asyncio
import time

from index_rig import KEYS, LEASE_S, agrees, key, routing, stored, worker
from redis.asyncio import Redis
from redis_fixtures import eventually

from kvhive.proto.index_schema import KEYS_PER_BATCH, LoadReport, stream_id

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
