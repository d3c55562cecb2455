"""From request to answer over real workers and a real index: hits, failover, stops, limits, cancels."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from redis_fixtures import connect, eventually
from router_rig import RouterRig, running_router
from worker_rig import WorkerRig

from kvhive.proto.block_hash import block_key
from kvhive.proto.errors import InvalidRequest, Overloaded, Unavailable
from kvhive.proto.index_schema import WorkerState
from kvhive.router.request import GenerateRequest, TokenPrompt
from kvhive.router.sampling_params import SamplingParams
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.worker.sequence import SamplingParams as WorkerSampling
from kvhive.worker.sequence import Sequence


async def test_the_second_request_goes_where_the_prefix_is(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf) as rig:
        shared = list(range(40))
        first = await rig.ask([*shared, 500])
        await rig.indexed()
        second = await rig.ask([*shared, 600])
        assert second.usage.worker_id == first.usage.worker_id
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 40)
        assert (first.usage.reachable_tokens, second.usage.reachable_tokens) == (0, 40)
        assert (first.usage.written_tokens, second.usage.written_tokens) == (40, 0)
        assert second.usage.route_reason == "prefix"
        assert second.token_ids == rig.oracle([*shared, 600], 4)


async def test_a_burst_of_equal_cold_prompts_converges_before_any_event(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """Predicted blocks stand in for an index that cannot know yet."""
    async with running_router(redis_server.url, demo_gguf, count=3) as rig:
        answers = await asyncio.gather(*(rig.ask([*range(200), 300 + i]) for i in range(6)))
        assert len({a.usage.worker_id for a in answers}) == 1


async def test_salts_never_meet_on_any_worker(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    """The salt is in the router's hash as in the worker's, with its positive control."""
    async with running_router(redis_server.url, demo_gguf) as rig:
        prompt = list(range(33))
        await rig.ask(prompt, cache_salt="s1")
        await rig.indexed()
        other = await rig.ask(prompt, cache_salt="s2")
        assert (other.usage.cached_tokens, other.usage.reachable_tokens) == (0, 0)
        same = await rig.ask(prompt, cache_salt="s1")
        assert (same.usage.cached_tokens, same.usage.reachable_tokens) == (32, 32)


async def stream_then(rig: RouterRig, strike: object, length: int = 60) -> object:
    """Run a stream; once output has begun, strike its worker."""
    begun = asyncio.Event()
    request = GenerateRequest(
        TokenPrompt(tuple(range(20))), SamplingParams(max_tokens=length, ignore_eos=True), request_id="r"
    )
    stream = asyncio.create_task(rig.run(request, begun))
    await begun.wait()
    victim = next(w for w in rig.workers.values() if w.service.open_streams)
    await strike(victim)  # type: ignore[operator]
    return await stream


async def test_a_stream_that_loses_its_worker_goes_on_elsewhere(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """No token lost or doubled, usage counted once, and the lost one cools down."""
    async with running_router(redis_server.url, demo_gguf, step_s=0.01) as rig:
        struck: list[str] = []

        async def kill(worker: object) -> None:
            struck.append(worker.worker_id)  # type: ignore[attr-defined]
            await worker.server.stop(0)  # type: ignore[attr-defined]

        answer = await stream_then(rig, kill)
        assert answer.token_ids == rig.oracle(list(range(20)), 60)  # type: ignore[attr-defined]
        usage = answer.usage  # type: ignore[attr-defined]
        assert (usage.failovers, usage.completion_tokens, usage.prompt_tokens) == (1, 60, 20)
        assert usage.worker_id not in struck
        after = [await rig.ask([i], 2) for i in range(5)]
        assert {a.usage.worker_id for a in after}.isdisjoint(struck)
        assert rig.state.loads.in_flight(struck[0]) == 0


async def test_a_stream_that_moved_counts_where_it_went(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with running_router(redis_server.url, demo_gguf, step_s=0.01) as rig:
        begun = asyncio.Event()
        sampling = SamplingParams(max_tokens=200, ignore_eos=True)
        stream = asyncio.create_task(rig.run(GenerateRequest(TokenPrompt((1, 2, 3)), sampling), begun))
        await begun.wait()
        victim = next(w for w in rig.workers.values() if w.service.open_streams)
        await victim.server.stop(0)
        survivor = next(w for w in rig.workers.values() if w is not victim)
        await eventually(lambda: survivor.service.open_streams == 1)
        assert rig.state.loads.in_flight(survivor.worker_id) == 1
        await stream
        assert rig.state.loads.in_flight(survivor.worker_id) == 0


async def test_closing_a_stream_before_its_first_token_leaves_nothing(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf) as rig:
        for _ in range(3):
            events = rig.dispatcher.generate(GenerateRequest(TokenPrompt((1, 2, 3))))
            await anext(events)
            await events.aclose()
        assert not rig.state.loads._reservations and rig.dispatcher.in_flight == 0


async def test_two_requests_may_bear_the_same_id(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    """A client's ids are its own affair: no worker is blamed for them."""
    async with running_router(redis_server.url, demo_gguf, step_s=0.005) as rig:
        answers = await asyncio.gather(*(rig.ask([1, 2, 3], 20, request_id="mine") for _ in range(4)))
        assert all(a.started and a.started.request_id == "mine" for a in answers)
        assert all(a.usage.failovers == 0 and len(a.token_ids) == 20 for a in answers)


async def test_a_full_worker_passes_a_request_on_without_blame(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """And only when every one it tries is full is the client told so."""
    async with running_router(redis_server.url, demo_gguf, step_s=0.01, max_waiting=0, blocks=1024) as rig:
        prompt = list(range(40))
        home = (await rig.ask(prompt, 2)).usage.worker_id
        await rig.indexed()

        def occupy(worker: WorkerRig) -> None:
            """Fill its slots from below: what goes through the router, policy may send elsewhere."""
            for i in range(8):
                options = WorkerSampling(max_tokens=900)
                worker.engine.submit(Sequence(f"{worker.worker_id}/{i}", [600 + i], 1, options))

        occupy(rig.workers[home])
        await eventually(lambda: rig.workers[home].engine.load.running == 8)
        other = await rig.ask([*prompt, 99], 2)
        assert other.usage.worker_id != home and other.usage.failovers == 0
        occupy(rig.workers[other.usage.worker_id])
        await eventually(lambda: all(w.engine.load.running == 8 for w in rig.workers.values()))
        with pytest.raises(Overloaded, match="requests are waiting, the limit is 0"):
            await rig.ask([5, 5])
        assert len(rig.registry.routable(time.monotonic())) == 2


async def test_a_failing_engine_is_failed_over_too(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with running_router(redis_server.url, demo_gguf, step_s=0.01) as rig:

        async def break_engine(worker: object) -> None:
            worker.runner.fails = True  # type: ignore[attr-defined]

        answer = await stream_then(rig, break_engine)
        assert answer.token_ids == rig.oracle(list(range(20)), 60)  # type: ignore[attr-defined]


async def test_losing_the_only_worker_is_a_retryable_error(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf, count=1, step_s=0.01) as rig:

        async def kill(worker: object) -> None:
            await worker.server.stop(0)  # type: ignore[attr-defined]

        with pytest.raises(Unavailable, match="worker w1 was lost and no worker is serving now"):
            await stream_then(rig, kill)


async def test_failovers_are_bounded(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with running_router(redis_server.url, demo_gguf, max_failovers=0, step_s=0.01) as rig:

        async def kill(worker: object) -> None:
            await worker.server.stop(0)  # type: ignore[attr-defined]

        with pytest.raises(Unavailable, match="lost 1 workers, the limit is 0"):
            await stream_then(rig, kill)


async def test_a_worker_that_drains_is_not_counted_as_lost(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf, max_failovers=0, step_s=0.01) as rig:
        begun = asyncio.Event()
        sampling = SamplingParams(max_tokens=900, ignore_eos=True)
        stream = asyncio.create_task(rig.run(GenerateRequest(TokenPrompt((1, 2, 3)), sampling), begun))
        await begun.wait()
        victim = next(w for w in rig.workers.values() if w.service.open_streams)
        survivor = next(w for w in rig.workers.values() if w is not victim)
        publisher = rig.publishers[victim.worker_id]
        victim.service.state = WorkerState.DRAINING
        await publisher.set_state(WorkerState.DRAINING)
        await eventually(lambda: rig.state.registry.is_draining(victim.worker_id, publisher.epoch))
        await victim.server.stop(0)
        await eventually(lambda: survivor.service.open_streams == 1)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)


async def test_a_draining_worker_gets_nothing_new(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with running_router(redis_server.url, demo_gguf) as rig:
        rig.workers["w1"].service.state = WorkerState.DRAINING
        await rig.publishers["w1"].set_state(WorkerState.DRAINING)
        answers = [await rig.ask([i, i + 1]) for i in range(8)]
        assert {a.usage.worker_id for a in answers} == {"w2"}


async def test_unrelated_cold_prompts_spread(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with running_router(redis_server.url, demo_gguf, count=3) as rig:
        answers = [await rig.ask([(17 * i + j) % 900 for j in range(30)]) for i in range(30)]
        assert min(Counter(a.usage.worker_id for a in answers).values()) > 0


async def test_a_stop_string_ends_the_text_and_the_stream(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """What the worker sent after the completing token counts for nothing."""
    async with running_router(redis_server.url, demo_gguf) as rig:
        prompt = list(range(10))
        whole = await rig.ask(prompt, 40)
        stop = whole.text[len(whole.text) // 2 :][:5]
        sampling = SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,))
        cut = await rig.ask(prompt, sampling=sampling)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finished is not None and cut.finished.reason == "stop"
        assert cut.usage.completion_tokens == len(cut.token_ids) < 40
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        await rig.idle()


async def test_what_was_held_back_is_delivered_at_the_end(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """The text ends with the beginning of a stop string."""
    async with running_router(redis_server.url, demo_gguf) as rig:
        whole = await rig.ask(list(range(10)), 20)
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, stop=(whole.text[-3:] + "@@@",))
        held = await rig.ask(list(range(10)), sampling=sampling)
        assert held.text == whole.text and held.finished is not None and held.finished.reason == "length"


async def test_closing_a_stream_frees_everything_at_once(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf, step_s=0.005) as rig:
        for i in range(10):
            begun = asyncio.Event()
            sampling = SamplingParams(max_tokens=900, ignore_eos=True)
            stream = asyncio.create_task(rig.run(GenerateRequest(TokenPrompt((i, 1)), sampling), begun))
            await begun.wait()
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
        await rig.idle()
        assert not rig.state.loads._reservations


async def test_one_request_too_many_is_refused(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with running_router(redis_server.url, demo_gguf, max_concurrent=2, step_s=0.01) as rig:
        streams = [asyncio.create_task(rig.ask([i], 300)) for i in range(2)]
        await eventually(lambda: rig.dispatcher.in_flight == 2)
        with pytest.raises(Overloaded, match="2 requests are in flight, the limit is 2"):
            await rig.ask([9])
        await asyncio.gather(*streams)
        assert (await rig.ask([9])).token_ids


async def test_what_no_pool_can_hold_is_refused_by_name(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with running_router(redis_server.url, demo_gguf) as rig:
        with pytest.raises(InvalidRequest, match="need 1101 tokens of KV, the largest pool holds 1024"):
            await rig.ask(list(range(101)), 1000)
        unlimited = SamplingParams(ignore_eos=True)
        filled = await rig.ask([*range(900), *range(100)], sampling=unlimited)
        assert filled.usage.completion_tokens == 24, "without max_tokens the pool's room is what is meant"
        for view in rig.state.registry.views():
            rig.state.registry.report_failure(view.record.worker_id, view.record.epoch)
        again = await rig.ask([*range(900), *range(100)], sampling=unlimited)
        assert again.usage.completion_tokens == 24, "also where all have just failed"


async def test_requests_go_on_while_redis_is_frozen_and_hit_again_after(
    own_redis: EmbeddedRedis, demo_gguf: Path
) -> None:
    """Past the staleness limit (5 s here) routing goes by load and home; nothing fails."""
    async with running_router(own_redis.url, demo_gguf) as rig:
        prompt = list(range(60))
        await rig.ask(prompt)
        await rig.indexed()
        os.kill(own_redis.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(7.0)
            assert rig.mirror.staleness_s() > 5.0
            during = [await rig.ask([700 + i, 1, 2]) for i in range(10)]
            assert all(a.usage.completion_tokens == 4 for a in during)
        finally:
            os.kill(own_redis.pid, signal.SIGCONT)
        await asyncio.sleep(1.5)
        assert (await rig.ask(prompt)).usage.cached_tokens == 56


async def test_redis_is_flushed_again_and_again_under_traffic(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """No request fails, answers stay right, nobody is claimed to hold what it does not, and a moment later
    each prefix is found where it is."""
    async with running_router(redis_server.url, demo_gguf) as rig, connect(redis_server.url) as redis:
        epochs = [publisher.epoch for publisher in rig.publishers.values()]
        flushing = True

        async def user(number: int) -> int:
            prompt, turns = [number * 50 + j for j in range(41)], 0
            while flushing:
                answer = await rig.ask([*prompt, turns % 900])
                assert answer.token_ids == rig.oracle([*prompt, turns % 900], 4)
                assert answer.usage.cached_tokens in (0, 40) and answer.usage.failovers == 0
                turns += 1
            return turns

        users = [asyncio.create_task(user(number)) for number in range(4)]
        for _ in range(5):
            await redis.flushall()
            await asyncio.sleep(0.3)
            for worker_id, worker in rig.workers.items():
                known = rig.mirror._slots[worker_id].keys
                assert len({*known} - {block_key(h) for h in list(worker.pool._by_hash)}) <= 8, (
                    "news on its way"
                )
        flushing = False
        assert min(await asyncio.gather(*users)) > 2
        assert any(publisher.epoch not in epochs for publisher in rig.publishers.values())
        await rig.indexed()
        for number in range(4):
            again = await rig.ask([number * 50 + j for j in range(41)])
            assert (again.usage.cached_tokens, again.usage.reachable_tokens) == (40, 40)
        assert rig.registry.counters.leases_ended == 0


async def test_tokenize_answers_what_generate_would_compute(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf, count=1) as rig:
        assert await rig.dispatcher.tokenize(TokenPrompt((1, 2))) == [1, 2]
        with pytest.raises(InvalidRequest, match="model: must be 'demo', is 'other'"):
            await rig.dispatcher.tokenize(TokenPrompt((1,)), "other")
