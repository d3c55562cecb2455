"""Streams that lose their workers at any token: what the client gets is what it would have got anyway.

On real (if tiny) weights, real schedulers and real sockets, with every option that a worker must be told
when it takes over: noise by seed and position, penalties that know where the prompt ended, stops that lie
across the break, log-probabilities, choices that have ended already.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_engine import VOCABULARY, tiny_model
from redis_fixtures import eventually
from router_rig import BLOCK, Answer, RouterRig, running_router

from kvhive.proto.errors import Unavailable
from kvhive.router.frontend import Delta, TokenLogprobs, Usage
from kvhive.router.openai.echo import echoed
from kvhive.router.request import GenerateRequest, TokenPrompt
from kvhive.router.sampling_params import Grammar, SamplingParams
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.worker.runner_loader import load_runner

LENGTH = 16
BLOCKS = 512
AT_ONCE = 40

SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "integer"}}}'
)
SEEDED: dict[str, Any] = {"temperature": 0.9}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": SEEDED,
    "filtered": {**SEEDED, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {**SEEDED, "frequency_penalty": 1.2},
    "presence": {"presence_penalty": 1.5},
    "biased": {**SEEDED, "logit_bias": ((17, 4.0), (23, -100.0))},
    "minimum": {**SEEDED, "min_tokens": 8, "stop_token_ids": tuple(range(0, 300, 9)), "ignore_eos": False},
    "ends": {**SEEDED, "ignore_eos": False},
    "logprobs": {**SEEDED, "logprobs": 4},
    "prompt_logprobs": {"logprobs": 2, "prompt_logprobs": 3},
    "stopped": {**SEEDED, "logprobs": 1},
    "undrafted": {**SEEDED, "speculate": False},
    "grammar": {**SEEDED, "grammar": Grammar("json_schema", SCHEMA), "logprobs": 1},
}
"""What is asked for; `stopped` gets a stop string out of the middle of its own unbroken text."""


def asked(kind: str, number: int, n: int = 1) -> GenerateRequest:
    """A request whose seed is its number."""
    chosen = random.Random(number)
    prompt = tuple(chosen.randrange(3, VOCABULARY) for _ in range(chosen.randint(5, 40)))
    options = {"max_tokens": LENGTH, "ignore_eos": True, "seed": number, **KINDS[kind]}
    return GenerateRequest(TokenPrompt(prompt), SamplingParams(**options), n=n)


def numbers(positions: list[TokenLogprobs]) -> list[float]:
    """All log-probabilities in a row: of the tokens, and of their alternatives."""
    return [value for each in positions for value in (each.logprob, *(logprob for _, logprob in each.top))]


def usage_of(answers: list[Answer]) -> Usage:
    """The one usage of a request: it comes once, with the last of its choices."""
    (usage,) = [a.finished.usage for a in answers if a.finished and a.finished.usage]
    return usage


def assert_same(answers: list[Answer], unbroken: list[Answer], what: str) -> None:
    """Same tokens, text, ends and log-probabilities, each counted once."""
    for answer, whole in zip(answers, unbroken, strict=True):
        assert answer.token_ids == whole.token_ids, what
        assert answer.text == whole.text, what
        assert answer.finished and whole.finished and answer.finished.reason == whole.finished.reason, what
        assert [[i for i, _ in p.top] for p in answer.logprobs] == [
            [i for i, _ in p.top] for p in whole.logprobs
        ]
        assert numbers(answer.logprobs) == pytest.approx(numbers(whole.logprobs), abs=1e-5), what
        assert numbers(answer.prompt_logprobs) == pytest.approx(numbers(whole.prompt_logprobs), abs=1e-5)
    usage, before = usage_of(answers), usage_of(unbroken)
    assert (usage.prompt_tokens, usage.completion_tokens) == (before.prompt_tokens, before.completion_tokens)


async def run_all(rig: RouterRig, requests: list[GenerateRequest]) -> list[list[Answer]]:
    """Run requests, some of them at once."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(request: GenerateRequest) -> list[Answer]:
        async with room:
            return await rig.run_all(request)

    return await asyncio.gather(*map(one, requests))


def with_stop(request: GenerateRequest, whole: Answer) -> GenerateRequest:
    """Let it stop at a piece of its own text that begins in one token and ends in another."""
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 6]
    return replace(request, sampling=replace(request.sampling, stop=(stop,)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), layers=2, seed=1)


async def test_two_hundred_streams_go_on_whatever_token_their_worker_dies_at(
    redis_server: EmbeddedRedis, demo_gguf: Path, model: Path
) -> None:
    """Every one of them goes on, and every third loses a second worker; token for token as without it."""
    kinds = [*KINDS] * 20
    requests = [
        asked(kind, 1000 + number, n=2 if number % 5 == 4 else 1) for number, kind in enumerate(kinds[:200])
    ]
    async with running_router(
        redis_server.url,
        demo_gguf,
        count=3,
        blocks=BLOCKS,
        cooldown_s=0.0,
        max_failovers=5,  # a loaded machine may answer pings too late
        real=lambda: load_runner(model, num_blocks=BLOCKS, block_size=BLOCK),
        limits={"queue_timeout_s": 120.0},
    ) as rig:
        unbroken = await run_all(rig, requests)
        for at, kind in enumerate(kinds[:200]):
            if kind == "stopped":
                requests[at] = with_stop(requests[at], unbroken[at][0])
                (unbroken[at],) = await run_all(rig, [requests[at]])
                assert any(a.finished and a.finished.reason == "stop" for a in unbroken[at])
        chance = random.Random(7)
        for number, (request, whole) in enumerate(zip(requests, unbroken, strict=True)):
            tokens = usage_of(whole).completion_tokens
            fates = [chance.randrange(tokens)]
            if number % 3 == 0 and fates[0] < tokens - 3 * request.n:
                fates.append(0)  # the next one dies before it has brought a token
            assert request.sampling.seed is not None
            rig.frail.fates[request.sampling.seed] = fates
        expected = sum(map(len, rig.frail.fates.values()))
        broken = await run_all(rig, requests)
        for kind, answers, whole in zip(kinds, broken, unbroken, strict=False):
            assert_same(answers, whole, kind)
            assert usage_of(answers).failovers >= 1, "it lost its worker"
        assert rig.frail.deaths == expected
        moved = sum(usage_of(answers).failovers for answers in broken)
        assert rig.dispatcher.counters.failovers == {"connection": moved} and moved >= expected
        assert rig.dispatcher.in_flight == 0 and not rig.state.loads._reservations


async def test_what_the_cache_gave_is_counted_as_the_first_worker_found_it(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """What a later one finds, or has to compute again, is not the caller's affair."""
    async with running_router(redis_server.url, demo_gguf, cooldown_s=0.0) as rig:
        prompt = list(range(40))
        await rig.ask(prompt)
        await rig.indexed()
        rig.frail.fates[5] = [3]
        sampling = SamplingParams(max_tokens=10, ignore_eos=True, seed=5)
        usage = (await rig.ask([*prompt, 7], sampling=sampling)).usage
        assert (usage.failovers, usage.cached_tokens, usage.reachable_tokens) == (1, 40, 40)
        assert (usage.prompt_tokens, usage.completion_tokens, usage.written_tokens) == (41, 10, 0)


async def test_a_worker_that_dies_takes_no_stream_with_it(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """Forty-eight on three workers, running and waiting, when one goes: the others have no room for all."""
    async with running_router(
        redis_server.url, demo_gguf, count=3, step_s=0.002, blocks=2048, max_waiting=12
    ) as rig:
        prompts = [[number, 1, 2] for number in range(48)]
        streams = [asyncio.create_task(rig.ask(prompt, 200)) for prompt in prompts]
        await eventually(lambda: any(w.service.open_streams >= 12 for w in rig.workers.values()))
        victim = max(rig.workers.values(), key=lambda worker: worker.service.open_streams)
        struck = victim.service.open_streams
        await victim.server.stop(0)
        answers = await asyncio.gather(*streams)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == rig.oracle(prompt, 200)
        moved = sum(answer.usage.failovers for answer in answers)
        assert moved >= 8 and moved >= struck - 8, "but for those whose last tokens were on their way"
        assert rig.dispatcher.counters.failovers == {"connection": moved}


async def test_failovers_end_with_a_word_on_when_to_come_again(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf, count=3, cooldown_s=0.0, max_failovers=1) as rig:
        rig.frail.fates[9] = [2, 2]
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, seed=9)
        with pytest.raises(Unavailable, match="lost 2 workers, the limit is 1") as refusal:
            await rig.ask([1, 2, 3], sampling=sampling)
        assert refusal.value.cause == "failovers" and refusal.value.retry_after_s
        assert rig.dispatcher.counters.failovers == {"connection": 1}


@pytest.mark.parametrize("dies_after", [0, 3])
async def test_an_echoed_prompt_is_not_echoed_twice(
    redis_server: EmbeddedRedis, demo_gguf: Path, dies_after: int
) -> None:
    """With its log-probabilities, and whether or not the first token had come."""
    async with running_router(redis_server.url, demo_gguf, cooldown_s=0.0) as rig:
        sampling = SamplingParams(max_tokens=6, ignore_eos=True, seed=5, logprobs=1, prompt_logprobs=1)
        request = GenerateRequest(TokenPrompt(tuple(range(300, 400))), sampling)

        async def run() -> tuple[str, list[int], list[float]]:
            text, ids, logprobs = "", list[int](), list[float]()
            async for event in echoed(rig.dispatcher, request):
                if isinstance(event, Delta):
                    text += event.text
                    ids += event.token_ids
                    logprobs += [position.logprob for position in event.logprobs]
            return text, ids, logprobs[1:]  # the first token of all follows nothing

        whole = await run()
        rig.frail.fates[5] = [dies_after]
        broken = await run()
        assert rig.frail.deaths == 1 and broken[:2] == whole[:2]
        assert len(broken[1]) == len(broken[2]) + 1 == 106
        assert broken[2] == pytest.approx(whole[2])
