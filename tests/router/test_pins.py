"""From breakpoints to usage: what workers are asked to keep, what became of it, and what clients are told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from open_doors import open_doors
from router_rig import RouterRig, running_router
from transfer_rig import TRANSFER, prompt_of

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.chat.messages import CacheBreakpoint, ChatMessage, ChatPrompt
from kvhive.router.frontend import KeptPrefix, Usage
from kvhive.router.pins import AskedPin, asked_pins, cache_split, kept_prefixes, worker_pins
from kvhive.router.prewarm import keeping
from kvhive.router.request import GenerateRequest, PromptPin, TextPrompt, TokenPrompt
from kvhive.router.sampling_params import SamplingParams
from kvhive.scripts.embedded_redis import EmbeddedRedis

HOUR, MINUTES = 3600.0, 300.0


def test_pins_are_of_full_blocks_and_what_is_too_short_is_not_asked_for() -> None:
    pins = [PromptPin(60.0, tokens) for tokens in (3, 4, 11, 40)]
    assert asked_pins(pins, 4, 0) == (
        AskedPin(0, 60.0, False),
        AskedPin(4, 60.0, True),
        AskedPin(8, 60.0, True),
        AskedPin(40, 60.0, True),
    )
    assert [pin.long_enough for pin in asked_pins(pins, 4, 9)] == [False, False, False, True]
    assert worker_pins(asked_pins([*pins, PromptPin(90.0, 42)], 4, 9)) == {40: 90.0}


@pytest.mark.parametrize(
    ("pinned", "refused", "kept", "why"),
    [
        (40, "", [False, True, True, True], ["below_minimum", "", "", ""]),
        (16, "over_budget", [False, True, True, False], ["below_minimum", "", "", "over_budget"]),
        (0, "making_room", [False] * 4, ["below_minimum", "below_minimum", "making_room", "making_room"]),
    ],
)
def test_each_breakpoint_says_whether_it_is_kept_and_why_not(
    pinned: int, refused: str, kept: list[bool], why: list[str]
) -> None:
    """The second one is below the minimum of 9, and kept where a longer one covers it."""
    pins = asked_pins([PromptPin(60.0, tokens) for tokens in (3, 8, 17, 41)], 4, 9)
    prefixes, first = kept_prefixes(pins, pinned, refused)
    assert [(p.tokens, p.kept, p.not_kept) for p in prefixes] == list(
        zip((0, 8, 16, 40), kept, why, strict=True)
    )
    assert first == "below_minimum"


def test_a_longer_one_covers_a_short_one_only_if_it_lasts_as_long() -> None:
    pins = asked_pins([PromptPin(HOUR, 8), PromptPin(MINUTES, 40)], 4, 9)
    prefixes, why = kept_prefixes(pins, 40, "")
    assert [prefix.kept for prefix in prefixes] == [False, True] and why == "below_minimum"
    assert kept_prefixes((), 0, "") == ((), "")


def usage_of(cached: int, written: int, *kept: tuple[int, float, bool], pulled: int = 0) -> Usage:
    prefixes = tuple(KeptPrefix(*each) for each in kept)
    return Usage(100, 5, cached_tokens=cached, written_tokens=written, pulled_tokens=pulled, kept=prefixes)


@pytest.mark.parametrize(
    ("usage", "read", "created", "plain"),
    [
        (usage_of(0, 96), 0, {}, 100),
        (usage_of(64, 32), 64, {}, 36),
        (usage_of(0, 96, (64, MINUTES, True)), 0, {MINUTES: 64}, 36),
        (usage_of(0, 96, (32, HOUR, True), (64, MINUTES, True)), 0, {HOUR: 32, MINUTES: 32}, 36),
        (usage_of(0, 96, (32, HOUR, True), (64, MINUTES, False)), 0, {HOUR: 32}, 68),
        (usage_of(48, 48, (32, HOUR, True), (64, MINUTES, True)), 48, {MINUTES: 16}, 36),
        (usage_of(64, 32, (64, MINUTES, True)), 64, {}, 36),
        # The longer time of a longer pin is the shorter one's, too.
        (usage_of(0, 96, (32, MINUTES, True), (64, HOUR, True)), 0, {HOUR: 64}, 36),
        # The last block of a prompt that is cached whole is computed again, and not written again.
        (usage_of(96, 0, (100, MINUTES, True)), 96, {}, 4),
        # Another request wrote it at the same time.
        (usage_of(0, 0, (64, MINUTES, True)), 0, {}, 100),
        # Another worker's cache is a cache: what was pulled was read, and only the rest was created.
        (usage_of(16, 16, (64, MINUTES, True), pulled=32), 48, {MINUTES: 16}, 36),
    ],
)
def test_the_split_of_the_input_is_the_whole_prompt(
    usage: Usage, read: int, created: dict[float, int], plain: int
) -> None:
    split = cache_split(usage)
    assert split == (read, created, plain)
    assert split.read + sum(split.created.values()) + split.plain == usage.prompt_tokens


def test_a_prewarmed_prompt_is_kept_whole_beside_what_it_asks_for_itself() -> None:
    text = keeping(GenerateRequest(TextPrompt("x"), pins=(PromptPin(5.0, 1),)), 60.0)
    assert text.pins == (PromptPin(5.0, 1), PromptPin(60.0))
    chat = ChatPrompt((ChatMessage("system", "s"), ChatMessage("user", "u")))
    kept = keeping(GenerateRequest(chat), 60.0).prompt
    assert isinstance(kept, ChatPrompt) and kept.breakpoints == (CacheBreakpoint(60.0, 1),)
    for ttl_s in (0.0, 86_401.0, float("nan")):
        with pytest.raises(InvalidRequest, match="ttl_s"):
            keeping(GenerateRequest(chat), ttl_s)


def pinned_blocks(rig: RouterRig) -> dict[str, int]:
    return {worker_id: worker.pool.leases.total for worker_id, worker in rig.workers.items()}


async def test_a_breakpoint_is_kept_and_the_usage_says_so_and_its_next_use_is_read(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf) as rig:
        prompt, pins = prompt_of(1, 102), (PromptPin(HOUR, 41), PromptPin(MINUTES))
        first = (await rig.ask(prompt, pins=pins)).usage
        assert first.kept == (KeptPrefix(40, HOUR, True), KeptPrefix(100, MINUTES, True))
        assert first.not_kept == ""
        assert cache_split(first) == (0, {HOUR: 40, MINUTES: 60}, 2)
        assert pinned_blocks(rig)[first.worker_id] == 25
        await rig.indexed()
        again = (await rig.ask([*prompt, *range(20)], pins=pins)).usage
        assert again.worker_id == first.worker_id
        assert cache_split(again) == (100, {MINUTES: 20}, 2)
        await rig.idle()


async def test_the_breakpoints_of_a_conversation_are_kept_as_it_grows_and_change_nothing(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """Fault 75: marked after the system message and at the end of each turn; unmarked text is evicted."""
    async with running_router(redis_server.url, demo_gguf, count=1, vocab_size=49152) as rig:
        turns = [ChatMessage("system", "You count sheep. " * 8), ChatMessage("user", "How many are there?")]

        def asked(*marks: CacheBreakpoint, salt: str = "") -> GenerateRequest:
            prompt = ChatPrompt(tuple(turns), breakpoints=marks)
            return GenerateRequest(prompt, SamplingParams(max_tokens=9, ignore_eos=True), cache_salt=salt)

        marks = CacheBreakpoint(HOUR, 0), CacheBreakpoint(MINUTES, 1)
        first = await rig.run(asked(*marks))
        system, turn = first.usage.kept
        assert system.kept and turn.kept and 0 < system.tokens < turn.tokens
        assert set(cache_split(first.usage).created) == {HOUR, MINUTES}
        plain = await rig.run(asked(salt="nobody"))
        assert plain.token_ids == first.token_ids and plain.usage.prompt_tokens == first.usage.prompt_tokens
        turns += [ChatMessage("assistant", first.text), ChatMessage("user", "And now?")]
        second = await rig.run(asked(marks[0], CacheBreakpoint(MINUTES, 3)))
        assert second.usage.cached_tokens >= turn.tokens
        last = second.usage.kept[-1]
        assert last.kept and last.tokens > turn.tokens
        for number in range(4):  # twice the pool
            await rig.ask(prompt_of(number, 500))
        assert (await rig.run(asked())).usage.cached_tokens == last.tokens
        turns[2:] = []
        assert (await rig.run(asked(salt="nobody"))).usage.cached_tokens == 0
        await rig.idle()


async def test_what_does_not_fit_is_refused_at_once_and_the_request_is_answered(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """Of 256 blocks one tenant may pin 64, all together 128; a pin below the minimum is not asked for."""
    limits = {"min_pinned_tokens": 8}
    async with running_router(redis_server.url, demo_gguf, count=1, limits=limits) as rig:
        refusals = []
        for number, tenant in enumerate(("a", "a", "b", "c")):
            answer = await rig.ask(
                prompt_of(number, 241), pins=(PromptPin(2 * HOUR, 7), PromptPin(HOUR, 240)), tenant=tenant
            )
            assert answer.token_ids == rig.oracle(prompt_of(number, 241), 4)
            short, long = answer.usage.kept
            assert (short.kept, short.not_kept, answer.usage.not_kept) == (False, *["below_minimum"] * 2)
            refusals.append(long.not_kept)
            assert cache_split(answer.usage).created == ({HOUR: 240} if long.kept else {})
        assert refusals == ["", "over_tenant_budget", "", "over_budget"]
        assert pinned_blocks(rig) == {"w1": 120}
        await rig.idle()


async def test_a_stream_that_moves_takes_its_pins_along(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    """Whether no token has come or some have; each choice goes on by itself and one lease is enough."""
    for tokens in (0, 3):
        async with running_router(redis_server.url, demo_gguf) as rig:
            rig.frail.fates[7] = [tokens]
            prompt = prompt_of(tokens, 41)
            request = GenerateRequest(
                TokenPrompt(tuple(prompt)),
                SamplingParams(max_tokens=6, ignore_eos=True, seed=7),
                n=2,
                pins=(PromptPin(HOUR, 24),),
            )
            answers = await rig.run_all(request)
            usage = next(a.finished.usage for a in answers if a.finished and a.finished.usage)
            assert rig.frail.deaths == usage.failovers == 1
            assert usage.kept == (KeptPrefix(24, HOUR, True),)
            assert pinned_blocks(rig)[usage.worker_id] == 6
            await rig.idle()


async def test_a_stream_whose_worker_has_no_more_room_for_it_goes_on_elsewhere(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """As pins may have it, after the first tokens; no failure of anybody's."""
    async with running_router(redis_server.url, demo_gguf) as rig:
        rig.frail.full, rig.frail.fates[7] = True, [3]
        prompt = prompt_of(1, 41)
        sampling = SamplingParams(max_tokens=9, ignore_eos=True, seed=7)
        answer = await rig.ask(prompt, sampling=sampling, pins=(PromptPin(HOUR, 24),))
        assert answer.token_ids == rig.oracle(prompt, 9)
        assert (answer.usage.failovers, rig.dispatcher.counters.passes) == (0, 1)
        assert answer.usage.kept == (KeptPrefix(24, HOUR, True),)
        assert pinned_blocks(rig)[answer.usage.worker_id] == 6
        await rig.idle()


async def test_prewarming_answers_when_every_worker_holds_and_keeps_it(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with running_router(redis_server.url, demo_gguf, count=3, transfer=TRANSFER) as rig:
        prompt = prompt_of(5, 201)
        request = keeping(GenerateRequest(TokenPrompt(tuple(prompt))), HOUR)
        warmed = await rig.dispatcher.prewarm(request, 3)
        assert pinned_blocks(rig) == {"w1": 50, "w2": 50, "w3": 50}
        assert [(usage.kept, usage.not_kept) for usage in warmed] == [
            ((KeptPrefix(200, HOUR, True),), "")
        ] * 3
        other = keeping(GenerateRequest(TokenPrompt(tuple(prompt_of(6, 201)))), HOUR)
        assert [usage.not_kept for usage in await rig.dispatcher.prewarm(other, 2)] == [
            "over_tenant_budget",
            "over_tenant_budget",
        ]
        await asyncio.gather(*(worker.idle() for worker in rig.workers.values()))


async def test_over_grpc_a_prewarmed_conversation_is_kept_and_found(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with open_doors(redis_server.url, demo_gguf) as doors:
        chat = pb.Chat()
        chat.messages.add(role="system", content="You count sheep. " * 8).cache_control.ttl_s = HOUR
        chat.messages.add(role="user", content="How many are there?")
        answer = await doors.grpc.Prewarm(pb.PrewarmRequest(chat=chat, ttl_s=MINUTES, workers=2))
        assert [(worker.kept, worker.not_kept) for worker in answer.workers] == [(True, ""), (True, "")]
        pinned = pinned_blocks(doors.rig)
        assert len(set(pinned.values())) == 1 and pinned["w1"] * 4 > answer.prompt_tokens // 2
        await doors.rig.indexed()
        sampling = pb.SamplingParams(max_tokens=2, ignore_eos=True)
        async for response in doors.grpc.Generate(pb.GenerateRequest(chat=chat, sampling=sampling)):
            usage = response.finished.usage
        assert usage.cached_tokens >= pinned["w1"] * 4
        assert [(prefix.ttl_s, prefix.kept) for prefix in usage.kept] == [(HOUR, True)]
        short = pb.PrewarmRequest(text="x", ttl_s=MINUTES)
        assert (await doors.grpc.Prewarm(short)).workers[0].not_kept == "below_minimum"
        count = doors.registry.get_sample_value
        assert count("kvhive_pins_total", {"outcome": "kept"}) == 5
        assert count("kvhive_pins_total", {"outcome": "below_minimum"}) == 1
