"""n choices of one request: own streams, own stops, one usage; failover takes each on from its own tokens."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from pathlib import Path

import pytest
from redis_fixtures import eventually
from router_rig import RouterRig, running_router

from kvhive.proto.errors import ComputeError
from kvhive.router.frontend import Delta, Finished
from kvhive.router.request import GenerateRequest, TokenPrompt
from kvhive.router.sampling_params import SamplingParams
from kvhive.scripts.embedded_redis import EmbeddedRedis

PROMPT = list(range(20))


def request(length: int, n: int = 3, prompt: list[int] = PROMPT, **fields: object) -> GenerateRequest:
    sampling = SamplingParams(length, ignore_eos=True, **fields)  # type: ignore[arg-type]
    return GenerateRequest(TokenPrompt(tuple(prompt)), sampling, n=n)


async def stop_of(rig: RouterRig, length: int, choice: int) -> str:
    """Text from the middle of one choice's output, which no other choice's has."""
    texts = [answer.text for answer in await rig.run_all(request(length))]
    middle = len(texts[choice]) // 2
    for size in range(3, 40):
        stop = texts[choice][middle : middle + size]
        if not any(stop in text for i, text in enumerate(texts) if i != choice):
            return stop
    raise AssertionError("the choices are all alike")


async def kill(rig: RouterRig) -> str:
    """Stop the worker that has the stream; return its id."""
    victim = next(worker for worker in rig.workers.values() if worker.service.open_streams)
    await victim.server.stop(0)
    return victim.worker_id


async def test_choices_come_interleaved_and_each_is_its_own(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf) as rig:
        order: list[int] = []
        finished: list[Finished] = []
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async with aclosing(rig.dispatcher.generate(request(30))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    order.append(event.choice)
                    tokens[event.choice].extend(event.token_ids)
                elif isinstance(event, Finished):
                    finished.append(event)
        assert tokens == {i: rig.oracle(PROMPT, 30, i) for i in range(3)}
        assert sum(a != b for a, b in itertools.pairwise(order)) > 10
        assert sorted(event.choice for event in finished) == [0, 1, 2]
        assert [event.usage is None for event in finished] == [True, True, False]
        usage = finished[-1].usage
        assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (20, 90)
        assert (usage.cached_tokens, usage.written_tokens) == (0, 20)
        await rig.idle()


async def test_a_stop_string_ends_its_own_choice_and_the_worker_hears_of_it(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf, count=1, step_s=0.003) as rig:
        stop = await stop_of(rig, 40, 1)
        stream = asyncio.create_task(rig.run_all(request(200, stop=(stop,), logprobs=2)))
        await eventually(lambda: rig.workers["w1"].engine.load.running == 3)
        await eventually(lambda: rig.workers["w1"].engine.load.running == 2)
        answers = await stream
        wholes = [rig.oracle(PROMPT, 200, i) for i in range(3)]
        for answer, whole in zip(answers, wholes, strict=True):
            assert answer.token_ids == whole[: len(answer.token_ids)]
            assert len(answer.logprobs) == len(answer.token_ids)
        assert answers[1].finished is not None and answers[1].finished.reason == "stop"
        assert len(answers[1].token_ids) < 40 and stop not in answers[1].text
        (usage,) = [a.finished.usage for a in answers if a.finished and a.finished.usage]
        assert usage.completion_tokens == sum(len(answer.token_ids) for answer in answers)
        await rig.idle()


@pytest.mark.parametrize("max_drafts", [0, 4])
async def test_choices_that_lose_their_worker_go_on_elsewhere_each_from_its_own_tokens(
    redis_server: EmbeddedRedis, demo_gguf: Path, max_drafts: int
) -> None:
    """One has ended before: it is not repeated. Nothing is lost or doubled, log-probabilities neither."""
    async with running_router(redis_server.url, demo_gguf, step_s=0.005, max_drafts=max_drafts) as rig:
        stop = await stop_of(rig, 20, 2)
        begun = asyncio.Event()
        stream = asyncio.create_task(rig.run_all(request(150, stop=(stop,), logprobs=1), begun))
        await begun.wait()
        await eventually(lambda: any(w.engine.load.running == 2 for w in rig.workers.values()))
        struck = await kill(rig)
        survivor = next(worker for name, worker in rig.workers.items() if name != struck)
        answers = await stream
        for i, answer in enumerate(answers):
            assert answer.token_ids == rig.oracle(PROMPT, 150, i)[: len(answer.token_ids)]
            assert len(answer.logprobs) == len(answer.token_ids)
            assert [p.logprob for p in answer.logprobs] == pytest.approx(
                [
                    survivor.runner.logprobs([*PROMPT, *answer.token_ids[:at]], token, 1).logprob
                    for at, token in enumerate(answer.token_ids)
                ]
            )
        assert len(answers[2].token_ids) < 20 and not survivor.service.open_streams
        (usage,) = [a.finished.usage for a in answers if a.finished and a.finished.usage]
        assert (usage.failovers, usage.worker_id, usage.prompt_tokens) == (1, survivor.worker_id, 20)
        assert usage.completion_tokens == sum(len(answer.token_ids) for answer in answers)
        assert (usage.accepted_tokens > 0) == (max_drafts > 0)
        assert usage.accepted_tokens <= usage.drafted_tokens


async def test_resumed_choices_share_their_prompt_again(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    """The first one computes it, the others find it."""
    async with running_router(redis_server.url, demo_gguf, step_s=0.01) as rig:
        prompt, begun = list(range(400)), asyncio.Event()
        stream = asyncio.create_task(rig.run_all(request(40, prompt=prompt), begun))
        await begun.wait()
        struck = await kill(rig)
        survivor = next(worker for name, worker in rig.workers.items() if name != struck)
        await stream
        assert survivor.engine.load.prefix_hits >= 2 * 400


async def test_a_request_that_is_lost_before_its_first_token_starts_again(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """As one group; the prompt's log-probabilities that went out are not sent twice."""
    async with running_router(redis_server.url, demo_gguf, step_s=0.03) as rig:
        prompt = list(range(300))
        wanted = GenerateRequest(TokenPrompt(tuple(prompt)), SamplingParams(5, prompt_logprobs=1), n=2)
        positions, tokens, struck = [], {0: list[int](), 1: list[int]()}, ""
        async with aclosing(rig.dispatcher.generate(wanted)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    positions.extend(event.prompt_logprobs)
                    tokens[event.choice].extend(event.token_ids)
                    if not struck:
                        assert 0 < len(positions) < 299
                        struck = await kill(rig)
        runner = rig.workers["w1"].runner
        assert [p.logprob for p in positions] == pytest.approx(
            [runner.logprobs(prompt[:i], prompt[i], 1).logprob for i in range(1, 300)]
        )
        assert tokens == {i: rig.oracle(prompt, 5, i) for i in range(2)}


async def test_the_text_may_not_end_before_min_tokens(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    """Neither by a stop string nor by a token; what was a stop string before is text."""
    async with running_router(redis_server.url, demo_gguf) as rig:
        whole = await rig.ask(PROMPT, 80)
        tokenizer = rig.dispatcher._tokenizer
        early = tokenizer.decode(whole.token_ids[2:4])
        late = whole.text[-12:]
        sampling = SamplingParams(80, ignore_eos=True, stop=(early, late), min_tokens=30)
        held = await rig.ask(PROMPT, sampling=sampling)
        assert early in held.text and len(held.token_ids) >= 30
        assert held.token_ids == whole.token_ids[: len(held.token_ids)]
        assert held.finished is not None and held.finished.reason == "stop"
        stops = tuple(whole.token_ids[:30])
        by_token = await rig.ask(PROMPT, sampling=SamplingParams(80, stop_token_ids=stops, min_tokens=9))
        assert len(by_token.token_ids) >= 9 and not set(by_token.token_ids[:9]) & set(stops)


async def test_a_choice_that_fails_fails_the_request(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with running_router(redis_server.url, demo_gguf) as rig:
        with pytest.raises(ComputeError):
            await rig.run_all(request(5, prompt=[1, 2, rig.workers["w1"].runner.POISON]))
        await rig.idle()


async def test_closing_a_request_of_many_choices_frees_everything(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """On its first worker and on a later one, where each choice has a stream of its own."""
    async with running_router(redis_server.url, demo_gguf, step_s=0.005, blocks=1024) as rig:
        for strike in (False, True):
            begun = asyncio.Event()
            stream = asyncio.create_task(rig.run_all(request(800), begun))
            await begun.wait()
            if strike:
                survivor = next(w for w in rig.workers.values() if not w.service.open_streams)
                await kill(rig)
                await eventually(lambda rest=survivor: rest.service.open_streams == 3)
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
            await rig.idle()
        assert not rig.state.loads._reservations and rig.dispatcher.in_flight == 0
