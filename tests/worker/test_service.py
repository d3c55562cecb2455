"""kvhive.v1.Worker over a real connection: streams, refusals, cancellations, and blocks back at rest."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import grpc
import pytest
from redis_fixtures import eventually
from worker_rig import METADATA, WorkerRig, running_worker

from kvhive.proto.index_schema import WorkerState
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.engine import EngineHooks

PIN = worker_pb2.WorkerPin(tokens=3, ttl_s=1)


def tokens_of(responses: list[worker_pb2.WorkerGenerateResponse]) -> list[int]:
    return [t for response in responses for update in response.updates for t in update.token_ids]


async def refusal(
    worker: WorkerRig, request: worker_pb2.WorkerGenerateRequest
) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await worker.generate(request)
    return error.value.code(), error.value.details() or ""


async def serves(worker: WorkerRig) -> None:
    """It answers, and then holds nothing."""
    assert len(tokens_of(await worker.generate(worker.request("good", [1, 2, 3])))) == 4
    await worker.idle()


async def test_a_stream_carries_every_token_once_and_says_what_was_cached() -> None:
    async with running_worker() as worker:
        prompt = list(range(10))
        for request_id, cached in (("a", 0), ("b", 8)):
            responses = await worker.generate(worker.request(request_id, prompt, 6))
            assert tokens_of(responses) == worker.oracle(prompt, 6)
            assert responses[0].cached_tokens == cached
            assert all(not r.HasField("cached_tokens") for r in responses[1:])
            last = responses[-1].updates[-1]
            assert last.HasField("finished") and not last.finished.stopped
        await worker.idle()


async def test_tokens_go_out_before_the_index_is_told_and_what_has_ended_is_left_alone() -> None:
    """Of one step: the engine's thread does the one, then the other, and is not woken once more."""
    async with running_worker() as worker:
        done: list[str] = []
        engine, hooks = worker.engine, worker.engine._hooks
        cancel = engine.cancel
        engine._hooks = EngineHooks(
            lambda outputs: (done.append("tokens"), hooks.deliver(outputs))[1],
            lambda events: (done.append("blocks"), hooks.publish(events))[1],
        )
        engine.cancel = lambda sequence: (done.append("cancelled"), cancel(sequence))[1]  # type: ignore[method-assign]
        await worker.generate(worker.request("a", range(10), 1))
        await worker.idle()
        await eventually(lambda: "blocks" in done)  # the engine may be between the two when a client knows
        assert done == ["tokens", "blocks"]


async def test_a_resumed_stream_goes_on_where_the_first_one_stopped() -> None:
    async with running_worker() as worker:
        prompt = [5, 6, 7]
        whole = tokens_of(await worker.generate(worker.request("a", prompt, 8)))
        rest = await worker.generate(worker.request("b", prompt + whole[:3], 5, resumed_tokens=3))
        assert whole[:3] + tokens_of(rest) == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": b""}, "token_ids: must not be empty"),
        ({"token_ids": b"abc"}, "token_ids: 3 bytes is not a multiple of 4"),
        (
            {"token_ids": b"\xff\xff\xff\xff"},
            "token_ids: must be below the vocabulary size 1000, is 4294967295 at 0",
        ),
        ({"request_id": ""}, "request_id: must have 1 to 128 characters, has 0"),
        ({"cache_salt": "x" * 257}, "cache_salt: must have at most 256 characters, has 257"),
        ({"resumed_tokens": 3}, "resumed_tokens: must be below the 3 token ids, is 3"),
        ({"n": 0}, "n: must be between 1 and 16, is 0"),
        ({"n": 17}, "n: must be between 1 and 16, is 17"),
        ({"n": 10, "first_choice": 7}, "first_choice: must be between 0 and 6, is 7"),
        ({"n": 2, "resumed_tokens": 1}, "n: must be 1 where one choice is resumed, is 2"),
        ({"priority": 11}, "priority: must be between -10 and 10, is 11"),
        ({"tenant": "x" * 257}, "tenant: must have at most 256 characters, has 257"),
        ({"pins": [PIN] * 17}, "pins: must have at most 16 entries, has 17"),
        (
            {"pins": [worker_pb2.WorkerPin(tokens=4, ttl_s=1)]},
            "pins[0].tokens: must be between 1 and 3, is 4",
        ),
        ({"pins": [worker_pb2.WorkerPin(tokens=3, ttl_s=math.nan)]}, "pins[0].ttl_s: must be between"),
    ],
)
async def test_a_bad_request_is_named_and_the_worker_keeps_serving(
    change: dict[str, object], message: str
) -> None:
    async with running_worker() as worker:
        request = worker.request("bad", [1, 2, 3])
        for name, value in change.items():
            request.ClearField(name)  # type: ignore[arg-type]
            request.MergeFrom(worker_pb2.WorkerGenerateRequest(**{name: value}))  # type: ignore[arg-type]
        code, details = await refusal(worker, request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT and message in details
        await serves(worker)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: must be at least 1, is 0"),
        ({"max_tokens": 8190}, "context of 8192, are 8193"),
        ({"max_tokens": 1022}, "need 1025 tokens of KV, the worker's pool holds 1024"),
        ({"temperature": math.nan}, "temperature: must be between 0 and 100, is nan"),
        ({"temperature": math.inf}, "temperature: must be between 0 and 100, is inf"),
        ({"top_p": 0}, "top_p: must be between"),
        ({"min_p": -1}, "min_p: must be between 0 and 1, is -1"),
        ({"typical_p": 0}, "typical_p: must be between"),
        ({"typical_p": 1.5}, "typical_p: must be between"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be between"),
        ({"repetition_penalty": 11}, "repetition_penalty: must be between"),
        ({"frequency_penalty": 2.5}, "frequency_penalty: must be between -2 and 2, is 2.5"),
        ({"presence_penalty": math.nan}, "presence_penalty: must be between -2 and 2, is nan"),
        ({"min_tokens": 5}, "min_tokens: must be between 0 and 4, is 5"),
        ({"logprobs": 21}, "logprobs: must be between 0 and 20, is 21"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs: must be between 0 and 20, is 1e+06"),
        (
            {"stop_token_ids": [1, 1000]},
            "stop_token_ids: must be below the vocabulary size 1000, is 1000 at 1",
        ),
        ({"logit_bias": {1000: 1}}, "logit_bias: must be below the vocabulary size 1000, is 1000 at 0"),
        ({"logit_bias": {7: math.inf}}, "logit_bias[7]: must be between -100 and 100, is inf"),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1)},
            "logit_bias: must have at most 1024 entries, has 1025",
        ),
    ],
)
async def test_bad_sampling_is_named_and_the_worker_keeps_serving(
    change: dict[str, Any], message: str
) -> None:
    async with running_worker() as worker:
        request = worker.request("bad", [1, 2, 3])
        for name, value in change.items():
            request.sampling.ClearField(name)  # type: ignore[arg-type]
            request.sampling.MergeFrom(worker_pb2.WorkerSampling(**{name: value}))
        code, details = await refusal(worker, request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT and message in details
        await serves(worker)


async def test_calls_without_the_clusters_token_are_refused() -> None:
    async with running_worker() as worker:
        for metadata in ((), (("kvhive-cluster-token", "wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in worker.stub.Generate(worker.request("a", [1]), metadata=metadata):
                    pass
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await worker.stub.GetStatus(worker_pb2.GetStatusRequest())
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_request_for_another_worker_is_refused() -> None:
    """A port that was reused is never mistaken for the worker that had it."""
    async with running_worker() as worker:
        request = worker.request("a", [1])
        request.worker_id = "w9"
        code, details = await refusal(worker, request)
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "'w9'" in details and "'w1'" in details


async def test_a_draining_worker_refuses_new_requests_and_still_reports() -> None:
    async with running_worker() as worker:
        worker.service.state = WorkerState.DRAINING
        code, _ = await refusal(worker, worker.request("a", [1]))
        assert code is grpc.StatusCode.UNAVAILABLE
        status = await worker.stub.GetStatus(worker_pb2.GetStatusRequest(), metadata=METADATA)
        assert status.blocks_free == status.blocks_total == 256


async def test_an_audit_tells_the_blocks_that_can_be_found_and_what_is_open() -> None:
    async with running_worker() as worker:
        call = worker.stub.Generate(worker.request("a", list(range(40)), 2), metadata=METADATA)
        async for _ in call:
            pass
        asked = worker_pb2.GetStatusRequest(audit=True)
        status = await worker.stub.GetStatus(asked, metadata=METADATA)
        assert status.audit.blocks == status.blocks_cached == 10
        assert status.audit.digest != 0
        assert (status.audit.open_requests, status.audit.sessions, status.audit.pinned_blocks) == (0, 0, 0)
        assert status.audit.tasks > 0
        plain = await worker.stub.GetStatus(worker_pb2.GetStatusRequest(), metadata=METADATA)
        assert not plain.HasField("audit")


async def test_cancelled_streams_leave_nothing_behind() -> None:
    """Cancelled at random moments, 20 at a time: no block stays held, and the next request is served."""
    rng = random.Random(7)
    async with running_worker(step_s=0.001, max_waiting=1000) as worker:

        async def one(i: int) -> None:
            call = worker.stub.Generate(worker.request(f"r{i}", [i % 900, 1, 2], 50), metadata=METADATA)
            reader = asyncio.create_task(call.read())
            await asyncio.sleep(rng.uniform(0, 0.05))
            call.cancel()
            await asyncio.gather(reader, return_exceptions=True)

        for start in range(0, 200, 20):
            await asyncio.gather(*(one(i) for i in range(start, start + 20)))
        await worker.idle()
        assert len(tokens_of(await worker.generate(worker.request("after", [1, 2])))) == 4


async def test_a_request_that_waits_too_long_for_its_first_token_is_given_up() -> None:
    async with running_worker(step_s=0.05) as worker:
        request = worker.request("a", range(600), 4, queue_timeout_s=0.1)
        code, details = await refusal(worker, request)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "no first token within 0.1 s" in details
        await worker.idle()


async def test_the_same_request_id_twice_at_once_is_refused() -> None:
    async with running_worker(step_s=0.01) as worker:
        first = asyncio.create_task(worker.generate(worker.request("same", [1], 20)))
        await asyncio.sleep(0.05)
        code, _ = await refusal(worker, worker.request("same", [1], 20))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert len(tokens_of(await first)) == 20


async def test_clearing_the_cache_of_an_idle_worker_takes_effect_at_once() -> None:
    """The pool is empty at once, without waiting for traffic, and the index is told."""
    async with running_worker() as worker:
        await worker.generate(worker.request("a", range(20)))
        await worker.idle()
        cleared = await worker.stub.ClearCache(worker_pb2.ClearCacheRequest(), metadata=METADATA)
        assert cleared.cleared_blocks == 5
        await worker.idle()
        assert worker.engine.load.blocks_free == 256
        assert sum(event.cause is not None for event in worker.events) == 5
        assert (await worker.generate(worker.request("b", range(20))))[0].cached_tokens == 0


async def test_a_slow_reader_holds_no_more_than_its_own_tokens() -> None:
    """Its stream finishes in the engine and frees its blocks long before it is read."""
    async with running_worker() as worker:
        responses = aiter(worker.stub.Generate(worker.request("slow", [1, 2], 500), metadata=METADATA))
        first = await anext(responses)
        await eventually(lambda: worker.engine.load.blocks_live == 0, 20)
        assert len(tokens_of([first, *[r async for r in responses]])) == 500


async def started(worker: WorkerRig) -> None:
    await eventually(lambda: worker.engine.steps > 0)


async def test_a_failing_engine_gives_every_stream_a_retryable_error() -> None:
    """Also when the pool itself is what is broken, so that nothing can be released."""
    for broken_pool in (False, True):
        async with running_worker(step_s=0.01) as worker:
            stream = asyncio.create_task(worker.generate(worker.request("a", [1], 500)))
            await started(worker)
            if broken_pool:
                worker.pool.release = worker.pool.clear  # type: ignore[method-assign,assignment]
            worker.runner.fails = True
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stream
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "engine failed" in (error.value.details() or "")
            code, _ = await refusal(worker, worker.request("b", [1]))
            assert code is grpc.StatusCode.UNAVAILABLE


async def test_a_stopping_engine_answers_those_who_came_last() -> None:
    async with running_worker(step_s=0.01) as worker:
        streams = [asyncio.create_task(worker.generate(worker.request(f"r{i}", [i], 500))) for i in range(5)]
        await started(worker)
        worker.engine.stop()
        for stream in streams:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stream
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_engine_that_has_stopped_answers_who_comes_after() -> None:
    async with running_worker() as worker:
        worker.engine.stop()
        await asyncio.to_thread(worker.thread.join)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await worker.generate(worker.request("late", [1], 5))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_logits_that_are_not_finite_fail_their_own_request_only() -> None:
    """Not retryable, and no block that it computed in that step can be hit."""
    async with running_worker(step_s=0.002) as worker:
        neighbour = asyncio.create_task(worker.generate(worker.request("good", range(10), 60)))
        await started(worker)
        poisoned = [*range(300, 320), worker.runner.POISON]
        code, details = await refusal(worker, worker.request("bad", poisoned, 5))
        assert code is grpc.StatusCode.INTERNAL and "not finite" in details
        assert tokens_of(await neighbour) == worker.oracle(range(10), 60)
        await worker.idle()
        again = await worker.generate(worker.request("again", [*range(300, 320), 1], 2))
        assert again[0].cached_tokens == 0
