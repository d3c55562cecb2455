"""Workers are killed, hung and cut off from Redis under real streams; nobody loses an answer."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from typing import Any

import pytest
from inference import Client, Result, by_tokens

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

PROMPT = [2000 + 13 * i for i in range(90)]


def serving(count: int) -> Any:
    return lambda c: sum(w.state == "serving" and w.routable for w in c.workers) == count


async def stream_and_strike(client: Client, salt: str, blow: signal.Signals) -> tuple[Result, Any]:
    """Start a stream, strike its worker once output has begun, return how it ended and who was struck."""
    begun = asyncio.Event()
    stream = asyncio.create_task(client.generate(by_tokens(PROMPT, 150, cache_salt=salt), first_token=begun))
    await begun.wait()
    await asyncio.sleep(0.3)
    # The worker that decodes is the one with a sequence in its batch.
    busy = await client.until(lambda c: any(w.running for w in c.workers), 5.0, "decoding")
    victim = next(w for w in busy.workers if w.running)
    os.kill(victim.pid, blow)
    return await stream, victim


async def test_a_killed_worker_s_stream_goes_on_elsewhere_and_ray_restarts_it(cluster: Any) -> None:
    """No token lost or doubled; not routed to while it is gone; back under a new epoch, serving."""
    async with Client(cluster.grpc) as client:
        await client.until(serving(2), 60.0, "two workers")
        whole = await client.generate(by_tokens(PROMPT, 150, cache_salt=secrets.token_hex(4)))
        struck, victim = await stream_and_strike(client, secrets.token_hex(4), signal.SIGKILL)
        assert struck.token_ids == whole.token_ids
        assert struck.text == whole.text
        assert struck.usage is not None and struck.usage.failovers == 1
        assert struck.usage.completion_tokens == 150
        assert struck.usage.worker_id != victim.id

        for i in range(6):
            now = await client.cluster()
            if any(w.id == victim.id and w.epoch == victim.epoch and w.routable for w in now.workers):
                raise AssertionError("the killed worker is still routable")
            result = await client.generate(by_tokens([*PROMPT, i], 2))
            assert result.usage is not None and result.usage.failovers == 0

        def returned(c: Any) -> bool:
            return any(w.id == victim.id and w.epoch > victim.epoch and w.routable for w in c.workers)

        await client.until(returned, 90.0, "restarted under a new epoch")
        salts = [secrets.token_hex(4) for _ in range(12)]
        used = {(await client.generate(by_tokens(PROMPT, 2, cache_salt=salt))).worker_id for salt in salts}
        assert victim.id in used


async def test_a_hung_worker_s_stream_goes_on_elsewhere_within_seconds(cluster: Any) -> None:
    """Found by pings, long before anything times out; back when it wakes up."""
    async with Client(cluster.grpc) as client:
        await client.until(serving(2), 60.0, "two workers")
        started = time.monotonic()
        victim = None
        try:
            struck, victim = await stream_and_strike(client, secrets.token_hex(4), signal.SIGSTOP)
            assert len(struck.token_ids) == 150
            assert struck.usage is not None and struck.usage.failovers == 1
            assert time.monotonic() - started < 60
        finally:
            if victim is not None:
                os.kill(victim.pid, signal.SIGCONT)
        await client.until(serving(2), 60.0, "two workers")


async def test_a_worker_that_stands_still_for_a_moment_is_not_taken_for_dead(cluster: Any) -> None:
    """Two seconds: it comes back into rotation as who it was, and what it had cached is found there."""
    async with Client(cluster.grpc) as client:
        before = await client.until(serving(2), 60.0, "two workers")
        salt = secrets.token_hex(4)
        first = await client.generate(by_tokens(PROMPT, 2, cache_salt=salt))
        victim = next(w for w in before.workers if w.id == first.worker_id)
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(2)
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        after = await client.until(serving(2), 30.0, "two workers still")
        assert {(w.id, w.epoch, w.pid) for w in after.workers} == {
            (w.id, w.epoch, w.pid) for w in before.workers
        }
        second = await client.generate(by_tokens(PROMPT, 2, cache_salt=salt))
        assert (second.worker_id, second.found) == (first.worker_id, 80)


async def test_a_router_that_stands_still_fails_nobody_when_it_goes_on(cluster: Any) -> None:
    """Longer than a lease and than any ping waits: its streams end as they would have, new requests are
    served at once and hit, and no worker was taken for dead."""
    async with Client(cluster.grpc) as client:
        before = await client.until(serving(2), 60.0, "two workers")
        salt, begun = secrets.token_hex(4), [asyncio.Event() for _ in range(4)]
        whole = await client.generate(by_tokens(PROMPT, 80, cache_salt=salt))
        streams = [
            asyncio.create_task(client.generate(by_tokens([*PROMPT], 80, cache_salt=s), first_token=event))
            for s, event in zip((salt, "a" + salt, "b" + salt, "c" + salt), begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        router = cluster.status()["router"]["pid"]
        os.kill(router, signal.SIGSTOP)
        try:
            await asyncio.sleep(6.5)
        finally:
            os.kill(router, signal.SIGCONT)
        fresh = await asyncio.gather(
            *(client.generate(by_tokens([*PROMPT, i], 4, cache_salt=salt)) for i in range(8))
        )
        assert [each.found for each in fresh] == [80] * 8
        for stream in streams:
            assert (await stream).token_ids == whole.token_ids
        after = await client.until(serving(2), 5.0, "two workers still")
        assert {(w.id, w.epoch) for w in after.workers} == {(w.id, w.epoch) for w in before.workers}
        await client.until(lambda c: c.index.connected and c.index.staleness_s < 2, 5.0, "fresh")


async def test_twenty_seconds_without_redis_fail_no_request(cluster: Any) -> None:
    """Under load, with the server frozen; when it is back, new blocks are routed to again."""
    async with Client(cluster.grpc) as client:
        await client.until(serving(2), 60.0, "two workers")
        salt, failures, done, stop = secrets.token_hex(4), [], 0, asyncio.Event()

        async def load(user: int) -> None:
            nonlocal done
            turn = 0
            while not stop.is_set():
                turn += 1
                try:
                    await client.generate(by_tokens([*PROMPT, user, turn % 50], 6, cache_salt=salt))
                    done += 1
                except Exception as error:
                    failures.append(repr(error))

        users = [asyncio.create_task(load(user)) for user in range(3)]
        redis_pid = cluster.status()["redis"]["pid"]
        await asyncio.sleep(2)
        os.kill(redis_pid, signal.SIGSTOP)
        try:
            before = done
            await asyncio.sleep(20)
            during = done - before
        finally:
            os.kill(redis_pid, signal.SIGCONT)
        stop.set()
        await asyncio.gather(*users)
        assert failures == []
        assert during > 10, "requests went on while Redis was gone"

        await client.until(lambda c: c.index.connected and c.index.staleness_s < 2, 15.0, "connected")
        fresh = [3000 + 11 * i for i in range(100)]
        first = await client.generate(by_tokens(fresh, 2, cache_salt=salt))
        await asyncio.sleep(1.5)
        second = await client.generate(by_tokens(fresh, 2, cache_salt=salt))
        assert second.usage is not None
        assert (second.worker_id, second.cached, second.usage.reachable_tokens) == (first.worker_id, 96, 96)


async def test_a_client_that_goes_away_frees_its_blocks(cluster: Any) -> None:
    async with Client(cluster.grpc) as client:
        for _ in range(10):
            begun = asyncio.Event()
            stream = asyncio.create_task(client.generate(by_tokens(PROMPT, 1000), first_token=begun))
            await begun.wait()
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
        await client.until(
            lambda c: all(w.blocks.live == 0 and w.running == 0 for w in c.workers), 5.0, "idle"
        )
