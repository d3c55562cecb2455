"""More than can be served in time: refused at once, by a prediction that says when to come again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from placing_rig import IDLE
from redis.asyncio import Redis
from redis_fixtures import eventually
from router_rig import running_router
from scripted_workers import ScriptedCluster, scripted_cluster

from kvhive.proto.errors import Overloaded, TimedOut, Unavailable
from kvhive.proto.index_schema import LoadReport
from kvhive.router.held_requests import RETRY_S
from kvhive.router.request import GenerateRequest, TokenPrompt
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.worker_client import WorkerBusy, WorkerLost
from kvhive.scripts.embedded_redis import EmbeddedRedis

PROMPT = range(200)
SPEED = dataclasses.replace(IDLE, step_base_s=0.0, step_per_token_s=0.001, step_per_attention_s=0.0)
"""A thousand prompt tokens a second."""


def queue_of(tokens: int, **more: object) -> LoadReport:
    """A worker with so many prompt tokens before the next request's."""
    return dataclasses.replace(SPEED, queued_prefill_tokens=tokens, waiting=1, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokenizer(demo_gguf: Path) -> TextTokenizer:
    return TextTokenizer.load(demo_gguf)


@asynccontextmanager
async def cluster_of(
    redis: Redis, tokenizer: TextTokenizer, count: int = 2, **limits: float
) -> AsyncIterator[ScriptedCluster]:
    with ThreadPoolExecutor(1) as executor:
        yield await scripted_cluster(redis, tokenizer, executor, count, **limits)


async def test_what_no_worker_can_begin_in_time_is_refused_at_once(
    index_redis: Redis, tokenizer: TextTokenizer
) -> None:
    """By the caller's deadline, by the queue's time-out, by a limit of the operator's: whichever is nearest.

    No worker hears of it, and nothing is left behind."""
    async with cluster_of(index_redis, tokenizer, max_predicted_ttft_s=8.0) as cluster:
        for worker_id in ("w1", "w2"):
            await cluster.join(worker_id, queue_of(12_000), epoch=9)
        with pytest.raises(Overloaded, match=r"in 12\.2 s or later, the limit is 8\.0 s") as refusal:
            await cluster.ask(PROMPT)
        assert "router.max_predicted_ttft_s is 8" in str(refusal.value)
        assert refusal.value.cause == "predicted_ttft"
        assert refusal.value.retry_after_s is not None
        assert 4.2 - 0.1 <= refusal.value.retry_after_s <= 1.5 * 4.2 + 0.1, "when the queue is short enough"
        with pytest.raises(Overloaded, match=r"the call's deadline is 3\.0 s"):
            await cluster.ask(PROMPT, timeout_s=3.0)
        assert not cluster.workers.calls and not cluster.state.loads._reservations
        for worker_id in ("w1", "w2"):
            await cluster.join(worker_id, queue_of(7000), epoch=9)
        await cluster.ask(PROMPT)


async def test_the_queue_timeout_refuses_at_once_what_it_would_end_later(
    index_redis: Redis, tokenizer: TextTokenizer
) -> None:
    async with cluster_of(index_redis, tokenizer, count=1) as cluster:
        await cluster.join("w1", queue_of(12_000), epoch=9)
        with pytest.raises(Overloaded, match=r"router\.queue_timeout_s is 10"):
            await cluster.ask(PROMPT)


async def test_a_worker_that_is_in_time_goes_before_a_cheaper_one_that_is_not(
    index_redis: Redis, tokenizer: TextTokenizer
) -> None:
    """It holds the prompt, and everybody who can wait goes there."""
    async with cluster_of(index_redis, tokenizer) as cluster:
        await cluster.join("w1", queue_of(190), epoch=9)
        await cluster.join("w2", SPEED, epoch=9)
        await cluster.warm("w1", PROMPT)
        assert await cluster.ask(PROMPT, timeout_s=100.0) == "w1"
        await cluster.join("w1", queue_of(290), epoch=9)
        assert await cluster.ask(PROMPT, timeout_s=0.25) == "w2"


async def test_what_waits_at_a_lower_priority_is_not_waited_for(
    index_redis: Redis, tokenizer: TextTokenizer
) -> None:
    """So batch work fills the queue without anybody else being refused, and is the first to be refused."""
    async with cluster_of(index_redis, tokenizer, count=1) as cluster:
        load = queue_of(12_000, queued_low_tokens=9000, waiting_low=1, queued_high_tokens=1000)
        await cluster.join("w1", load, epoch=9)
        with pytest.raises(Overloaded, match=r"in 12\.2 s"):
            await cluster.ask(PROMPT, priority=-1)
        with pytest.raises(Overloaded, match=r"in 3\.2 s"):
            await cluster.ask(PROMPT, timeout_s=2.0)
        await cluster.ask(PROMPT, timeout_s=5.0)
        await cluster.ask(PROMPT, timeout_s=2.0, priority=1)


async def test_full_batches_are_part_of_the_prediction(index_redis: Redis, tokenizer: TextTokenizer) -> None:
    """Sixteen places, all taken, and 31 wait: 32 answers of 100 tokens end at 16 every 100 steps."""
    async with cluster_of(index_redis, tokenizer, count=1) as cluster:
        load = dataclasses.replace(
            SPEED,
            step_base_s=0.02,
            max_running=16,
            running=16,
            waiting=31,
            answer_tokens=100.0,
            growth_tokens=1600.0,
        )
        await cluster.join("w1", load, epoch=9)
        with pytest.raises(Overloaded, match=r"in 7\.\d s"):
            await cluster.ask(PROMPT, timeout_s=5.0)
        await cluster.join("w1", dataclasses.replace(load, growth_tokens=160.0), epoch=9)
        await cluster.ask(PROMPT, timeout_s=5.0)  # they are short, or nearly over
        await cluster.join("w1", dataclasses.replace(load, running=15, waiting=0), epoch=9)
        await cluster.ask(PROMPT, timeout_s=5.0)


async def test_how_long_answers_are_is_told_by_those_that_run(
    index_redis: Redis, tokenizer: TextTokenizer
) -> None:
    """A batch of 16 has 1600 tokens to go; of this router's 48 requests there 32 wait, and decode nothing."""
    async with cluster_of(index_redis, tokenizer, count=1) as cluster:
        load = dataclasses.replace(
            SPEED,
            step_base_s=0.02,
            max_running=16,
            running=16,
            waiting=32,
            answer_tokens=100.0,
            growth_tokens=1600.0,
        )
        await cluster.join("w1", load, epoch=9)
        for number in range(48):
            cluster.state.loads.reserve(f"r{number}", "w1", 0, -9.0)
        with pytest.raises(Overloaded, match=r"in [78]\.\d s"):
            await cluster.ask(PROMPT, timeout_s=5.0)


async def test_when_all_queues_are_full_the_prediction_says_when_to_come_again(
    index_redis: Redis, tokenizer: TextTokenizer
) -> None:
    async with cluster_of(index_redis, tokenizer) as cluster:
        for worker_id in ("w1", "w2"):
            await cluster.join(worker_id, queue_of(8000), epoch=9)
            cluster.workers.errors[worker_id] = WorkerBusy("256 requests are waiting, the limit is 256")
        with pytest.raises(Overloaded, match="every worker that was tried is full: 256 requests") as refusal:
            await cluster.ask(PROMPT)
        assert refusal.value.cause == "queues_full" and cluster.dispatcher.counters.passes == 2
        assert refusal.value.retry_after_s is not None and 1.0 <= refusal.value.retry_after_s <= 1.6


async def test_a_time_that_is_over_says_which_and_how_long_it_was(
    index_redis: Redis, tokenizer: TextTokenizer
) -> None:
    async with cluster_of(index_redis, tokenizer) as cluster:
        cluster.workers.errors = {w: TimedOut("too late") for w in ("w1", "w2")}
        with pytest.raises(
            TimedOut, match=r"waited 0\.0 s for a token of worker w\d: router\.queue_timeout_s"
        ) as q:
            await cluster.ask(PROMPT)
        with pytest.raises(TimedOut, match=r"the call's deadline is 5\.0 s") as d:
            await cluster.ask(PROMPT, timeout_s=5.0)
        assert (q.value.cause, d.value.cause) == ("queue_timeout", "deadline")
        sent = [request.queue_timeout_s for request in cluster.workers.requests]
        assert sent == [10.0, 5.0], "the worker gives up when the caller does"


async def test_tenant_and_priority_reach_the_worker_and_so_does_that_it_moved(
    index_redis: Redis, tokenizer: TextTokenizer
) -> None:
    async with cluster_of(index_redis, tokenizer) as cluster:
        await cluster.warm("w1", PROMPT)
        cluster.workers.errors["w1"] = WorkerLost("gone")
        assert await cluster.ask(PROMPT, tenant="acme", priority=3) == "w2"
        first, second = cluster.workers.requests
        assert (first.tenant, first.priority, first.moved) == ("acme", 3, False)
        assert (second.tenant, second.priority, second.moved) == ("acme", 3, True)
        assert cluster.dispatcher.counters.failovers == {"connection": 1}


async def test_who_has_been_let_in_is_not_refused_because_its_worker_was_lost(
    index_redis: Redis, tokenizer: TextTokenizer
) -> None:
    async with cluster_of(index_redis, tokenizer, max_predicted_ttft_s=1.0) as cluster:
        await cluster.join("w1", SPEED, epoch=9)
        await cluster.join("w2", queue_of(5000), epoch=9)
        cluster.workers.errors["w1"] = WorkerLost("gone")
        assert await cluster.ask(PROMPT) == "w2"


async def test_requests_are_held_until_a_worker_serves(index_redis: Redis, tokenizer: TextTokenizer) -> None:
    """At zero workers; what they ask for is decided by the worker that comes, and its pool."""
    async with cluster_of(index_redis, tokenizer, count=0, max_held=4, hold_s=60.0) as cluster:
        asked = [asyncio.create_task(cluster.ask([n, 1, 2])) for n in range(4)]
        await eventually(lambda: cluster.dispatcher.held == 4)
        with pytest.raises(Unavailable, match="4 requests wait for one, the limit is 4") as refusal:
            await cluster.ask(PROMPT)
        assert refusal.value.cause == "held_full" and refusal.value.retry_after_s is not None
        assert RETRY_S <= refusal.value.retry_after_s <= 1.5 * RETRY_S
        gone = asked.pop()
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert cluster.dispatcher.held == 3, "who has gone is not held"
        await cluster.join("w1")
        assert await asyncio.gather(*asked) == ["w1"] * 3
        assert cluster.dispatcher.held == cluster.dispatcher.in_flight == 0


async def test_what_is_held_takes_the_pool_of_the_worker_that_comes(
    index_redis: Redis, tokenizer: TextTokenizer
) -> None:
    """A request that named no number of tokens was made when there was no pool to go by."""
    async with cluster_of(index_redis, tokenizer, count=0, max_held=4, hold_s=60.0) as cluster:
        request = GenerateRequest(TokenPrompt(tuple(PROMPT)))

        async def run() -> None:
            async for _ in cluster.dispatcher.generate(request):
                pass

        held = asyncio.create_task(run())
        await eventually(lambda: cluster.dispatcher.held == 1)
        await cluster.join("w1")
        await held
        assert cluster.workers.requests[0].sampling.max_tokens == 2048 - 200


async def test_nobody_is_held_for_ever(index_redis: Redis, tokenizer: TextTokenizer) -> None:
    """Unavailable after the longest hold; or the caller's deadline, where that is nearer."""
    async with cluster_of(index_redis, tokenizer, count=0, max_held=4, hold_s=0.2) as cluster:
        with pytest.raises(Unavailable, match=r"no worker has served for 0\.2 s") as refusal:
            await cluster.ask(PROMPT)
        assert refusal.value.cause == "no_worker" and refusal.value.retry_after_s is not None
        with pytest.raises(TimedOut, match=r"for a worker: the call's deadline is 0\.1 s"):
            await cluster.ask(PROMPT, timeout_s=0.1)
        assert cluster.dispatcher.held == 0
        assert cluster.dispatcher.counters.first_tokens == 2, "asked for, and not served"


async def test_a_stream_whose_only_worker_restarts_goes_on_there(
    index_redis: Redis, tokenizer: TextTokenizer
) -> None:
    """However many are held already: it was promised its answer."""
    async with cluster_of(index_redis, tokenizer, count=1, max_held=0, hold_s=60.0) as cluster:
        cluster.workers.errors["w1"] = WorkerLost("killed")
        stream = asyncio.create_task(cluster.ask(PROMPT))
        await eventually(lambda: cluster.dispatcher.held == 1)
        cluster.workers.errors.clear()
        await cluster.join("w1", epoch=2)
        assert await stream == "w1"
        assert cluster.workers.calls == {"w1": 2}


async def test_without_a_hold_a_missing_worker_is_said_at_once(
    index_redis: Redis, tokenizer: TextTokenizer
) -> None:
    async with cluster_of(index_redis, tokenizer, count=0) as cluster:
        with pytest.raises(Unavailable, match="no worker is serving now") as refusal:
            await cluster.ask(PROMPT)
        assert refusal.value.cause == "no_worker"


async def test_a_flood_of_one_tenant_refuses_none_of_another(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """Sixty at once where the router takes sixteen: they are refused by the dozen, and all of another one's
    requests are served, one after the other."""
    async with running_router(
        redis_server.url,
        demo_gguf,
        count=1,
        step_s=0.002,
        blocks=2048,
        max_concurrent=16,
        limits={"queue_timeout_s": 300.0},  # on a loaded machine much is predicted to take long
    ) as rig:
        over = asyncio.Event()
        refused = served = 0

        async def flood(number: int) -> None:
            nonlocal refused, served
            while not over.is_set():
                try:
                    await rig.ask([number, 1, 2], 40, tenant="flood")
                    served += 1
                except Overloaded as error:
                    assert error.cause == "in_flight" and error.retry_after_s is not None
                    refused += 1
                    await asyncio.sleep(0.01)

        floods = [asyncio.create_task(flood(number)) for number in range(60)]
        await eventually(lambda: rig.dispatcher.in_flight >= 16 and refused > 0)
        for number in range(10):
            answer = await rig.ask([number, 7, 8], 4, tenant="other")
            assert len(answer.token_ids) == 4
        over.set()
        await asyncio.gather(*floods)
        assert refused >= 12 and served > 0
        assert rig.dispatcher.in_flight == 0
