"""Whose record is it? A worker knows its own, newer or older than it remembers, from a successor's."""

from __future__ import annotations

import asyncio

from index_rig import KEYS, stored, worker
from redis.asyncio import Redis
from redis_fixtures import eventually

from kvhive.worker.index_calls import IndexCall
from kvhive.worker.index_scripts import REGISTER
from kvhive.worker.kv_event_publisher import KvEventPublisher


async def agrees(redis: Redis, publisher: KvEventPublisher) -> None:
    async def check() -> bool:
        held = set(await redis.smembers(KEYS.blocks("w1", publisher.epoch)))
        return publisher.lag_batches == 0 and held == publisher.held()

    await eventually(check)


async def test_a_registration_whose_answer_was_lost_is_known_as_our_own(
    index_redis: Redis,
) -> None:
    """Else a worker would stay silent until its own lease ends."""
    async with worker(index_redis, lease_s=60.0) as publisher:
        publisher.add(stored(1))
        await agrees(index_redis, publisher)
        run, deaf = publisher._run, asyncio.Event()

        async def run_and_hear_nothing(call: IndexCall) -> list[bytes]:
            answer = await run(call)
            if call.script is REGISTER and not deaf.is_set():
                deaf.set()
                raise ConnectionError("the answer was lost")
            return answer

        publisher._run = run_and_hear_nothing
        await index_redis.delete(KEYS.blocks("w1", publisher.epoch))
        publisher.add(stored(2))
        await deaf.wait()
        await eventually(lambda: publisher.counters.resnapshots == 1 and not publisher._failures)
        await agrees(index_redis, publisher)
        assert publisher.counters.fenced == 0
        assert int((await index_redis.hgetall(KEYS.worker("w1")))[b"epoch"]) == publisher.epoch


async def test_an_older_record_of_ours_is_no_successor_s(index_redis: Redis) -> None:
    """As after a failover to a replica that had not heard of the newest epoch."""
    async with worker(index_redis) as publisher:
        publisher.add(stored(1))
        await agrees(index_redis, publisher)
        epoch = publisher.epoch
        await index_redis.hset(KEYS.worker("w1"), "epoch", str(epoch - 1))
        await eventually(lambda: publisher.epoch > epoch)
        await agrees(index_redis, publisher)
        assert (publisher.counters.fenced, publisher.counters.resnapshots) == (0, 1)
