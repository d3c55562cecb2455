"""n choices behind one stream of a worker: shared prompt, own tokens, stopped one by one or as a group."""

from __future__ import annotations

import grpc
import pytest
from redis_fixtures import eventually
from worker_rig import METADATA, WorkerRig, running_worker

from kvhive.proto.v1 import worker_pb2


def choices_of(responses: list[worker_pb2.WorkerGenerateResponse]) -> dict[int, list[int]]:
    """The tokens of each choice, none of which has news after its end."""
    tokens: dict[int, list[int]] = {}
    ended: set[int] = set()
    for update in (update for response in responses for update in response.updates):
        assert update.choice not in ended
        tokens.setdefault(update.choice, []).extend(update.token_ids)
        if update.HasField("finished"):
            ended.add(update.choice)
    return tokens


def only(responses: list[worker_pb2.WorkerGenerateResponse]) -> list[int]:
    """The tokens of the single choice."""
    (tokens,) = choices_of(responses).values()
    return tokens


async def refusal(
    worker: WorkerRig, request: worker_pb2.WorkerGenerateRequest
) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await worker.generate(request)
    return error.value.code(), error.value.details() or ""


async def test_choices_share_the_prompt_and_each_is_its_own_stream() -> None:
    async with running_worker() as worker:
        prompt = list(range(22))
        responses = await worker.generate(worker.request("a", prompt, 9, n=3, first_choice=4))
        assert choices_of(responses) == {i: worker.oracle(prompt, 9, i) for i in (4, 5, 6)}
        counts = [(r.cached_tokens, r.written_tokens) for r in responses if r.HasField("cached_tokens")]
        assert counts == [(0, 20)], "the first choice tells, once"
        assert any(len(response.updates) > 1 for response in responses), "ready together, sent together"
        await worker.idle()
        assert worker.engine.load.blocks_cached == 5 + 3 * 2, "the prompt's blocks are there once"


async def test_one_choice_stops_and_the_others_go_on() -> None:
    async with running_worker(step_s=0.005) as worker:
        call = aiter(worker.stub.Generate(worker.request("a", [1, 2, 3], 60, n=3), metadata=METADATA))
        responses = [await anext(call)]

        async def stop(request_id: str, *choices: int) -> None:
            wanted = worker_pb2.StopChoicesRequest(request_id=request_id, choices=choices)
            await worker.stub.StopChoices(wanted, metadata=METADATA)

        await stop("a", 1, 1, 99)
        await stop("nobody", 0)
        await eventually(lambda: worker.engine.load.running == 2)
        responses.extend([response async for response in call])
        tokens = choices_of(responses)
        assert {i: tokens[i] for i in (0, 2)} == {i: worker.oracle([1, 2, 3], 60, i) for i in (0, 2)}
        assert len(tokens.get(1, [])) < 60
        await stop("a", 0)
        await worker.idle()


async def test_stopping_every_choice_ends_the_stream() -> None:
    async with running_worker(step_s=0.005) as worker:
        call = aiter(worker.stub.Generate(worker.request("a", [1], 900, n=2), metadata=METADATA))
        await anext(call)
        wanted = worker_pb2.StopChoicesRequest(request_id="a", choices=[0, 1])
        await worker.stub.StopChoices(wanted, metadata=METADATA)
        assert sum(len(u.token_ids) for r in [r async for r in call] for u in r.updates) < 100
        await worker.idle()


async def test_choices_are_cancelled_and_refused_as_a_group() -> None:
    async with running_worker(step_s=0.005, max_waiting=4) as worker:
        call = worker.stub.Generate(worker.request("a", range(300), 600, n=8), metadata=METADATA)
        await eventually(lambda: worker.engine.load.running > 0)
        code, _ = await refusal(worker, worker.request("b", [1], 4, n=16))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        await worker.idle()
        assert len(choices_of(await worker.generate(worker.request("c", [1], 4, n=8)))) == 8


async def test_log_probabilities_come_one_per_token_and_before_the_output_for_the_prompt() -> None:
    """A prompt of several steps; the prompt's are the first choice's alone, and cost it the cache."""
    async with running_worker() as worker:
        prompt = list(range(150))
        await worker.generate(worker.request("warm", prompt))
        sampling = worker_pb2.WorkerSampling(logprobs=3, prompt_logprobs=2)
        responses = await worker.generate(worker.request("a", prompt, 5, sampling, n=2))
        first = next(i for i, response in enumerate(responses) if response.updates)
        assert first > 0 and not any(response.prompt_logprobs for response in responses[first + 1 :])
        given = [position for response in responses for position in response.prompt_logprobs]
        expected = [worker.runner.logprobs(prompt[:i], prompt[i], 2) for i in range(1, 150)]
        assert [tuple(p.top_ids) for p in given] == [tuple(t for t, _ in e.top) for e in expected]
        assert [p.logprob for p in given] == pytest.approx([e.logprob for e in expected])
        assert [r.cached_tokens for r in responses if r.HasField("cached_tokens")] == [0]
        for update in (update for response in responses for update in response.updates):
            assert len(update.logprobs) == len(update.token_ids)
            assert all(len(p.top_ids) == len(p.top_logprobs) == 3 for p in update.logprobs)


async def test_drafts_change_no_token_and_are_counted_to_the_end() -> None:
    async with running_worker(max_drafts=3) as worker:
        sampling = worker_pb2.WorkerSampling(logprobs=1)
        responses = await worker.generate(worker.request("a", [1, 2, 3], 40, sampling, n=2))
        assert choices_of(responses) == {i: worker.oracle([1, 2, 3], 40, i) for i in (0, 1)}
        assert all(len(u.logprobs) == len(u.token_ids) for r in responses for u in r.updates)
        last = {u.choice: (u.drafted_tokens, u.accepted_tokens) for r in responses for u in r.updates}
        load = worker.engine.load
        assert sum(drafted for drafted, _ in last.values()) == load.drafted_tokens > 0
        assert sum(accepted for _, accepted in last.values()) == load.accepted_tokens > 0
        off = worker.request("b", [1, 2, 3], 9)
        off.sampling.speculate = False
        assert (await worker.generate(off))[-1].updates[-1].drafted_tokens == 0


async def test_pins_are_kept_and_told() -> None:
    async with running_worker() as worker:
        pins = [worker_pb2.WorkerPin(tokens=10, ttl_s=60)]
        responses = await worker.generate(worker.request("a", range(22), n=2, pins=pins))
        assert [r.pinned_tokens for r in responses if r.HasField("pinned_tokens")] == [8]


async def test_a_resumed_choice_keeps_its_minimum_and_its_stream() -> None:
    """min_tokens counts what the earlier worker has generated, and choice says whose noise it is."""
    async with running_worker() as worker:
        prompt = list(range(10))
        every = worker_pb2.WorkerSampling(min_tokens=12, stop_token_ids=range(900))
        whole = only(await worker.generate(worker.request("a", prompt, 30, every, first_choice=2)))
        assert 12 < len(whole) <= 30 and max(whole[:12]) >= 900 > whole[-1]
        for done in (1, 7, 12):
            resumed = worker.request(
                "b", prompt + whole[:done], 30 - done, every, first_choice=2, resumed_tokens=done
            )
            assert whole[:done] + only(await worker.generate(resumed)) == whole


async def test_a_slow_reader_of_many_log_probabilities_gets_them_in_bounded_messages() -> None:
    async with running_worker(blocks=2048) as worker:
        sampling = worker_pb2.WorkerSampling(logprobs=20)
        request = worker.request("slow", [1, 2], 1500, sampling, n=4)
        call = aiter(worker.stub.Generate(request, metadata=METADATA))
        first = await anext(call)
        await eventually(lambda: not worker.engine.load.running, 30)
        await worker.generate(worker.request("normal", [3]))
        rest = [response async for response in call]
        assert sum(len(tokens) for tokens in choices_of([first, *rest]).values()) == 6000
        assert max(response.ByteSize() for response in rest) < 600_000
