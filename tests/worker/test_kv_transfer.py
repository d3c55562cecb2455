"""Pulls between whole workers: what comes, what is told of it, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from transfer_rig import TRANSFER, ask, at_rest, outcomes, pair, prompt_of, source_of, until
from worker_rig import IDENTITY, METADATA, ROOT, running_worker

from kvhive.proto.block_chain import hash_chain
from kvhive.proto.block_hash import namespace_extras
from kvhive.proto.v1 import worker_pb2
from kvhive.worker import transfer_lanes, transfer_target
from kvhive.worker.transfer_group import GroupChannel
from kvhive.worker.transfer_party import Emulation
from kvhive.worker.transfer_socket import SocketChannel

SLOW = Emulation(bytes_per_s=200.0)
"""A chunk of 64 bytes takes a third of a second, a chain of 20 blocks more than one."""


@pytest.mark.parametrize(("backend", "kind"), [("auto", SocketChannel), ("gloo", GroupChannel)])
async def test_a_pulled_prompt_is_neither_computed_nor_called_cached(backend: str, kind: type) -> None:
    """Fault 98: a prompt that came by a pull is no hit; the next one is. The index hears of every block."""
    async with pair(replace(TRANSFER, backend=backend)) as (a, b):
        prompt = prompt_of(1, 83)
        await ask(a, "first", prompt)
        steps_tokens = b.engine.load.prefix_hits
        first = await ask(b, "pulled", prompt, source_of(a, 20))
        assert (first.cached_tokens, first.pulled_tokens, first.written_tokens) == (0, 80, 0)
        again = await ask(b, "again", prompt, source_of(a, 20))
        assert (again.cached_tokens, again.pulled_tokens) == (80, 0)
        assert await outcomes(b) == {"pulled": 1}
        assert b.engine.load.prefix_hits == steps_tokens + 80
        assert b.engine.load.pulled_tokens == 80
        assert [e.key for e in b.events[:20]] == [e.key for e in a.events[:20]]
        assert b.transfer is not None and isinstance(b.transfer._target._lanes._lanes["a"].channel, kind)
        await at_rest(a, b)


@pytest.mark.parametrize(
    ("backends", "outcome"),
    [(("auto", "gloo"), "pulled"), (("gloo", "auto"), "pulled"), (("tcp", "gloo"), "refused")],
)
async def test_two_workers_speak_what_both_can_and_else_compute(
    backends: tuple[str, str], outcome: str
) -> None:
    configs = [replace(TRANSFER, backend=backend) for backend in backends]
    async with running_worker("a", transfer=configs[0]) as a, running_worker("b", transfer=configs[1]) as b:
        prompt = prompt_of(90, 41)
        await ask(a, "first", prompt)
        answer = await ask(b, "pulled", prompt, source_of(a, 10))
        assert answer.pulled_tokens == (40 if outcome == "pulled" else 0)
        assert await outcomes(b) == {outcome: 1}
        await at_rest(a, b)


async def test_only_what_is_missing_comes_and_what_the_source_lacks_is_computed() -> None:
    async with pair() as (a, b):
        prompt = prompt_of(2, 80)
        await ask(a, "whole", prompt[:60])
        await ask(b, "part", prompt[:23])
        answer = await ask(b, "pulled", prompt, source_of(a, 19))
        assert (answer.cached_tokens, answer.pulled_tokens, answer.written_tokens) == (20, 40, 20)
        assert await outcomes(b) == {"short": 1}
        await at_rest(a, b)


async def test_a_salt_is_kept() -> None:
    """Fault 20: another salt moves nothing; the same one does."""
    async with pair() as (a, b):
        prompt = prompt_of(3, 41)
        await ask(a, "s1", prompt, cache_salt="s1")
        other = await ask(b, "s2", prompt, source_of(a, 10), cache_salt="s2")
        assert (other.cached_tokens, other.pulled_tokens) == (0, 0)
        assert a.engine.desk.sent_blocks == 0
        same = await ask(b, "s1", prompt, source_of(a, 10), cache_salt="s1")
        assert (same.cached_tokens, same.pulled_tokens) == (0, 40)
        await at_rest(a, b)


@pytest.mark.parametrize(
    "identity",
    [
        replace(IDENTITY, model="another"),
        replace(IDENTITY, namespace="another"),
        replace(IDENTITY, kv_dtype="fp8"),
        replace(IDENTITY, layout="(8,)"),
        replace(IDENTITY, block_size=8),
        replace(IDENTITY, tp=2),
    ],
    ids=lambda identity: str(identity)[17:],
)
async def test_blocks_of_another_kind_are_refused_and_the_answer_is_computed(identity: object) -> None:
    async with pair(identity=identity) as (a, b):
        prompt = prompt_of(4, 41)
        await ask(a, "first", prompt)
        answer = await ask(b, "pulled", prompt, source_of(a, 10))
        assert (answer.cached_tokens, answer.pulled_tokens, answer.written_tokens) == (0, 0, 40)
        assert await outcomes(b) == {"refused": 1}
        await at_rest(a, b)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"epoch": 2}, "refused"),
        ({"worker_id": "c"}, "refused"),
        ({"address": "127.0.0.1:1"}, "unreachable"),
        ({"address": "no such host.invalid:1"}, "unreachable"),
    ],
)
async def test_a_source_that_is_not_there_costs_only_the_pull(
    change: dict[str, object], outcome: str
) -> None:
    async with pair() as (a, b):
        prompt = prompt_of(5, 41)
        await ask(a, "first", prompt)
        answer = await ask(b, "pulled", prompt, source_of(a, 10, **change))
        assert answer.pulled_tokens == 0
        assert await outcomes(b) == {outcome: 1}
        await at_rest(a, b)


async def test_a_source_that_failed_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each request would wait for its time-out anew. A new epoch begins without a stain."""
    async with pair() as (a, b):
        monkeypatch.setattr(transfer_target, "AVOID_FIRST_S", 60.0)
        for index in range(3):
            await ask(b, f"r{index}", prompt_of(30 + index, 41), source_of(a, 10, address="127.0.0.1:1"))
        assert await outcomes(b) == {"unreachable": 1, "avoided": 2}
        await ask(b, "epoch", prompt_of(40, 41), source_of(a, 10, address="127.0.0.1:1", epoch=2))
        assert (await outcomes(b))["unreachable"] == 2
        assert b.transfer is not None
        b.transfer._target._avoided = {("a", 1): (0.0, 60.0)}  # its time is over
        await ask(a, "first", prompt_of(41, 41))
        assert (await ask(b, "later", prompt_of(41, 41), source_of(a, 10))).pulled_tokens == 40
        await at_rest(a, b)


async def test_sequences_that_want_the_same_blocks_wait_for_one_pull() -> None:
    async with pair(emulation=Emulation(bytes_per_s=2000.0)) as (a, b):
        prompt = prompt_of(6, 81)
        await ask(a, "first", prompt)
        pull = asyncio.create_task(ask(b, "r", prompt, source_of(a, 20)))
        await until(lambda: bool(b.engine.desk.moves.arrivals()))
        # The router names no source where it knows that somebody is on the way with one.
        sources = [source_of(a, 20), None, source_of(a, 20), None]
        answers = await asyncio.gather(*(ask(b, f"r{i}", [*prompt, i], s) for i, s in enumerate(sources)))
        answers.append(await pull)
        assert sum(answer.pulled_tokens for answer in answers) == 5 * 80
        assert (await outcomes(b))["pulled"] == 1
        await until(lambda: a.engine.desk.sent_blocks == 20)  # it hears of the end a moment later
        await at_rest(a, b)


async def test_a_cancelled_pull_ends_and_frees_everything_on_both_sides() -> None:
    """Fault 80. What had come by then stays cached."""
    async with pair(emulation=SLOW) as (a, b):
        prompt = prompt_of(7, 81)
        await ask(a, "first", prompt)
        stream = b.stub.Generate(b.request("gone", prompt, 4, source=source_of(a, 20)), metadata=METADATA)
        await until(lambda: b.pool.usage().cached + b.engine.load.blocks_live > 0)
        await until(lambda: any(arrival.arrived for arrival in b.engine.desk.moves.arrivals()))
        stream.cancel()
        await at_rest(a, b)
        assert await outcomes(b) == {"cancelled": 1}
        assert 0 < b.pool.usage().cached < 20
        await ask(b, "later", prompt)


async def test_what_a_cancelled_pull_was_filling_serves_the_next_prompt_untouched() -> None:
    """Faults 81 and 82: wherever it is cut, its blocks are given out only when nothing writes to them."""
    async with pair(emulation=Emulation(bytes_per_s=2000.0), blocks=24) as (a, b):
        for number in range(8):
            prompt = prompt_of(100 + number, 81)
            await ask(a, f"first{number}", prompt)
            request = b.request(f"gone{number}", prompt, 4, source=source_of(a, 20))
            stream = b.stub.Generate(request, metadata=METADATA)
            await until(lambda: bool(b.engine.desk.moves.arrivals()))
            await asyncio.sleep(0.02 * number)
            stream.cancel()
            await ask(b, f"next{number}", prompt_of(200 + number, 81))
        await at_rest(a, b)


async def test_a_pull_that_takes_too_long_leaves_the_rest_to_be_computed() -> None:
    async with pair(replace(TRANSFER, timeout_s=0.8), SLOW) as (a, b):
        prompt = prompt_of(8, 81)
        await ask(a, "first", prompt)
        answer = await ask(b, "pulled", prompt, source_of(a, 20))
        assert 0 < answer.pulled_tokens < 80
        assert answer.pulled_tokens + answer.written_tokens == 80
        assert await outcomes(b) == {"timed_out": 1}
        await at_rest(a, b)


async def test_decoding_goes_on_at_both_ends_of_a_slow_pull() -> None:
    """The engine's thread never waits for a transfer: while one crawls, others are answered."""
    config = replace(TRANSFER, timeout_s=60.0, stall_timeout_s=60.0)
    async with pair(config, Emulation(bytes_per_s=20.0)) as (a, b):
        prompt = prompt_of(50, 81)
        await ask(a, "first", prompt)
        pull = asyncio.create_task(ask(b, "pulled", prompt, source_of(a, 20)))
        await until(lambda: bool(b.engine.desk.moves.arrivals()))
        for number in range(3):
            await asyncio.gather(*(ask(w, f"r{number}", prompt_of(60 + number, 9)) for w in (a, b)))
        assert b.engine.desk.moves.arrivals(), "other requests waited for the pull"
        pull.cancel()
        await at_rest(a, b)


async def test_a_full_pool_pulls_nothing_and_still_answers() -> None:
    async with pair(blocks=24, step_s=0.1) as (a, b):
        long, prompt = prompt_of(9, 80), prompt_of(10, 41)
        await ask(a, "first", prompt)
        running = asyncio.create_task(ask(b, "long", long))
        await until(lambda: b.pool.usage().live >= 20)
        answer = await ask(b, "pulled", prompt, source_of(a, 10))
        await running
        assert answer.pulled_tokens in (0, 12, 16, 20, 24, 28, 32, 36, 40)
        await at_rest(a, b)


async def test_a_source_sends_to_as_many_as_it_may() -> None:
    config = replace(TRANSFER, max_concurrent=1)
    async with pair(config, SLOW) as (a, b), running_worker("c", transfer=config) as c:
        prompt = prompt_of(11, 61)
        await ask(a, "first", prompt)
        slow = asyncio.create_task(ask(b, "slow", prompt, source_of(a, 15)))
        await until(lambda: not a.engine.desk.moves.idle)
        await ask(c, "refused", prompt, source_of(a, 15))
        assert await outcomes(c) == {"busy": 1}
        assert (await slow).pulled_tokens == 60
        await at_rest(a, b, c)


async def test_more_peers_than_channels_are_kept_for_still_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three peers of a source that keeps one channel, all at once and twice: none loses it under its pull."""
    monkeypatch.setattr(transfer_lanes, "MAX_LANES", 1)
    config = replace(TRANSFER, max_concurrent=3, timeout_s=20.0, stall_timeout_s=10.0)
    async with (
        pair(config) as (a, b),
        running_worker("c", transfer=config) as c,
        running_worker("d", transfer=config) as d,
    ):
        for turn in range(2):
            prompt = prompt_of(80 + turn, 81)
            await ask(a, f"first{turn}", prompt)
            answers = await asyncio.gather(*(ask(w, f"p{turn}", prompt, source_of(a, 20)) for w in (b, c, d)))
            assert [answer.pulled_tokens for answer in answers] == [80] * 3
        for worker in (b, c, d):
            assert await outcomes(worker) == {"pulled": 2}
        await at_rest(a, b, c, d)


async def test_with_prompt_logprobs_nothing_is_pulled() -> None:
    async with pair() as (a, b):
        prompt = prompt_of(12, 41)
        await ask(a, "first", prompt)
        sampling = worker_pb2.WorkerSampling(prompt_logprobs=1)
        answers = await b.generate(b.request("p", prompt, 4, sampling=sampling, source=source_of(a, 10)))
        assert answers[-1].updates[-1].HasField("finished")
        assert a.engine.desk.sent_blocks == 0


async def test_choices_share_what_the_first_one_pulled() -> None:
    async with pair() as (a, b):
        prompt = prompt_of(13, 41)
        await ask(a, "first", prompt)
        answers = await b.generate(b.request("n", prompt, 4, source=source_of(a, 10), n=3))
        for choice in range(3):
            tokens = [t for r in answers for u in r.updates if u.choice == choice for t in u.token_ids]
            assert tokens == b.oracle(prompt, 4, choice)
        assert answers[0].pulled_tokens == 40
        await at_rest(a, b)


async def test_a_worker_that_does_not_move_blocks_computes() -> None:
    async with running_worker("a", transfer=TRANSFER) as a, running_worker("b") as b:
        prompt = prompt_of(14, 41)
        await ask(a, "first", prompt)
        assert (await ask(b, "off", prompt, source_of(a, 10))).pulled_tokens == 0
        await ask(b, "other", prompt_of(15, 41))
        assert (await ask(a, "from off", prompt_of(15, 41), source_of(b, 10))).pulled_tokens == 0
        assert await outcomes(a) == {"unreachable": 1}


def test_the_salt_is_part_of_a_chain() -> None:
    chain = hash_chain(ROOT, [1, 2, 3, 4], 4, namespace_extras("s1"))
    assert chain != hash_chain(ROOT, [1, 2, 3, 4], 4, namespace_extras("s2"))


async def test_a_pull_whose_turn_does_not_come_does_not_blame_its_source() -> None:
    config = replace(TRANSFER, max_concurrent=1, timeout_s=1.0)
    async with pair(config, SLOW) as (a, b), running_worker("c", transfer=config) as c:
        slow, quick = prompt_of(70, 81), prompt_of(71, 41)
        await ask(a, "first", slow)
        await ask(c, "first", quick)
        first = asyncio.create_task(ask(b, "slow", slow, source_of(a, 20)))
        await until(lambda: bool(b.engine.desk.moves.arrivals()))
        answer = await ask(b, "waiting", quick, source_of(c, 10))
        await first
        assert answer.pulled_tokens == 0
        assert await outcomes(b) == {"timed_out": 1, "busy": 1}
        await ask(c, "second", prompt_of(72, 41))
        assert (await ask(b, "later", prompt_of(72, 41), source_of(c, 10))).pulled_tokens == 40
        await at_rest(a, b, c)


async def test_workers_of_several_ranks_give_nothing() -> None:
    """Each rank has a part of a block: alike or not, they do not move."""
    identity = replace(IDENTITY, tp=2)
    async with (
        running_worker("a", transfer=TRANSFER, identity=identity) as a,
        running_worker("b", transfer=TRANSFER, identity=identity) as b,
    ):
        prompt = prompt_of(80, 41)
        await ask(a, "first", prompt)
        assert (await ask(b, "pulled", prompt, source_of(a, 10))).pulled_tokens == 0
        assert await outcomes(b) == {"refused": 1}
