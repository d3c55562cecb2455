"""A worker that fails is skipped, tried by one request now and then, and comes back; callers fail none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis_fixtures import eventually
from scripted_workers import ScriptedCluster, scripted_cluster

from kvhive.proto.errors import ComputeError, InvalidRequest, KvhiveError, TimedOut, Unavailable
from kvhive.router.request import GenerateRequest, TokenPrompt
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.worker_client import WorkerBusy, WorkerLost

PROMPT = range(200)
LOST = WorkerLost("it accepts everything and fails")


@pytest.fixture(scope="module")
def tokenizer(demo_gguf: Path) -> TextTokenizer:
    return TextTokenizer.load(demo_gguf)


@pytest.fixture
async def cluster(index_redis: Redis, tokenizer: TextTokenizer) -> AsyncIterator[ScriptedCluster]:
    """Two workers, of which w1 holds PROMPT."""
    with ThreadPoolExecutor(1) as executor:
        cluster = await scripted_cluster(index_redis, tokenizer, executor)
        await cluster.warm("w1", PROMPT)
        yield cluster


async def test_a_worker_that_always_fails_costs_a_failover_now_and_then(cluster: ScriptedCluster) -> None:
    """Although it holds the prefix: at 0, 5, 15 and 35 s of one request a second, not at each of them."""
    cluster.workers.errors["w1"] = LOST
    tried = []
    for second in range(60):
        before = cluster.workers.calls["w1"]
        assert await cluster.ask(PROMPT) == "w2"
        if cluster.workers.calls["w1"] > before:
            tried.append(second)
        cluster.clock.now += 1.0
    assert tried == [0, 5, 15, 35]


async def test_it_is_tried_by_one_request_at_a_time(cluster: ScriptedCluster) -> None:
    cluster.workers.errors["w1"] = LOST
    await cluster.ask(PROMPT)
    cluster.clock.now += 5.0
    cluster.workers.open.clear()
    burst = [asyncio.create_task(cluster.ask(PROMPT)) for _ in range(10)]
    await eventually(lambda: cluster.workers.calls.total() >= 2 + 10)
    assert cluster.workers.calls["w1"] == 2, "the first failure, and the trial"
    reasons = cluster.state.registry.excluded(cluster.clock())
    assert reasons == {"w1": "it failed, and one request is trying it"}
    cluster.workers.open.set()
    assert set(await asyncio.gather(*burst)) == {"w2"}
    assert cluster.state.registry.excluded(cluster.clock()) == {"w1": "it failed, and is skipped for 10.0 s"}


async def test_a_trial_that_goes_well_brings_it_back_at_once(cluster: ScriptedCluster) -> None:
    cluster.workers.errors["w1"] = LOST
    await cluster.ask(PROMPT)
    cluster.workers.errors.clear()
    assert (cluster.routable(), await cluster.ask(PROMPT)) == (["w2"], "w2")
    cluster.clock.now += 5.0
    assert [await cluster.ask(PROMPT) for _ in range(5)] == ["w1"] * 5
    assert cluster.routable() == ["w1", "w2"]


async def test_where_there_is_no_other_all_may_try_it(cluster: ScriptedCluster) -> None:
    """A trial that takes long must not turn everybody away."""
    cluster.workers.errors["w1"] = LOST
    await cluster.ask(PROMPT)
    cluster.workers.errors = {"w2": LOST}
    cluster.clock.now += 5.0
    cluster.state.registry.report_failure("w2", 2)
    cluster.workers.open.clear()
    burst = [asyncio.create_task(cluster.ask(PROMPT)) for _ in range(3)]
    await asyncio.sleep(0.05)
    cluster.workers.open.set()
    assert await asyncio.gather(*burst) == ["w1"] * 3


async def test_who_has_failed_is_asked_rather_than_a_request_refused(cluster: ScriptedCluster) -> None:
    """All have failed lately and are well again: nobody waits for pauses that may last 80 s."""
    cluster.workers.errors = {"w1": LOST, "w2": LOST}
    with pytest.raises(Unavailable):
        await cluster.ask(PROMPT)
    assert cluster.routable() == []
    cluster.workers.errors.clear()
    assert await cluster.ask(PROMPT) == "w1"


async def test_a_stream_that_loses_the_last_good_worker_goes_on_at_one_that_failed(
    cluster: ScriptedCluster,
) -> None:
    cluster.workers.errors["w1"] = LOST
    assert await cluster.ask(PROMPT) == "w2"
    cluster.workers.errors = {"w2": LOST}
    assert cluster.routable() == ["w2"]
    assert await cluster.ask(PROMPT) == "w1"


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("max_tokens", "too many"), TimedOut("queue_timeout_s"), ComputeError("no number")],
    ids=lambda error: type(error).__name__,
)
async def test_errors_that_would_be_the_same_elsewhere_count_against_nobody(
    cluster: ScriptedCluster, error: KvhiveError
) -> None:
    cluster.workers.errors["w1"] = error
    for _ in range(10):
        with pytest.raises(type(error)):
            await cluster.ask(PROMPT)
    assert cluster.workers.calls == {"w1": 10} and cluster.routable() == ["w1", "w2"]
    assert cluster.state.loads.in_flight("w1") == 0


async def test_a_full_queue_and_a_client_that_goes_count_against_nobody(cluster: ScriptedCluster) -> None:
    cluster.workers.errors["w1"] = WorkerBusy("64 requests are waiting")
    assert [await cluster.ask(PROMPT) for _ in range(5)] == ["w2"] * 5
    cluster.workers.errors.clear()
    cluster.workers.open.clear()
    for _ in range(5):
        task = asyncio.create_task(cluster.ask(PROMPT))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert cluster.routable() == ["w1", "w2"] and cluster.state.loads.in_flight("w1") == 0


async def test_a_failed_dispatch_leaves_nothing_behind(cluster: ScriptedCluster) -> None:
    """No reservation, and no prediction that would draw the next equal prompt there."""
    cold = range(500, 700)
    home = await cluster.ask(cold)
    other = "w2" if home == "w1" else "w1"
    cluster.state.predicted.drop(home)
    cluster.workers.errors[home] = LOST
    assert await cluster.ask(cold) == other
    keys = (await cluster.preparer.prepare(GenerateRequest(TokenPrompt(tuple(cold))))).keys
    assert dict(cluster.state.predicted.extend(keys, {}, cluster.clock())) == {other: len(keys)}
    assert cluster.state.loads.in_flight(home) == cluster.state.loads.in_flight(other) == 0
