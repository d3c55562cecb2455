"""On real weights: what stands behind cached, shared, recycled and recomputed blocks is the cold answer."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from real_engine import BLOCK, CONTEXT, VOCABULARY, RealEngine, request, tiny_model

from kvhive.worker.sequence import FinishReason, Sequence


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "target", 2, 1)


@pytest.fixture(scope="module")
def cold(model: Path) -> RealEngine:
    """Where requests run alone, with nothing cached, in one chunk."""
    return RealEngine(model, blocks=40, budget=CONTEXT)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def test_ten_endings_behind_one_cached_prefix_answer_as_cold(model: Path, cold: RealEngine) -> None:
    """Six full blocks of system prompt: each later question finds exactly them, a fresh salt nothing."""
    engine, system = RealEngine(model, blocks=64, budget=512), text(0, 6 * BLOCK)
    asked = [request(f"q{i}", system + text(i, 1 + i), 5) for i in range(1, 11)]
    expected = cold.run_cold(*asked)
    engine.run(request("system", system, 1))
    for seq, tokens in zip(asked, expected, strict=True):
        assert engine.run(seq) == [tokens]
        assert engine.cached(seq.request_id) == 6 * BLOCK
        salted = request(f"{seq.request_id} salted", seq.tokens, 5, salt=seq.request_id)
        assert engine.run(salted) == [tokens]
        assert engine.cached(salted.request_id) == 0


def test_a_hundred_interleaved_prompts_that_part_within_a_block_leak_nothing(
    model: Path, cold: RealEngine
) -> None:
    """P+X and P+Y, |P| = 2.5 blocks: exactly two blocks are shared, and each gets its own answer."""
    engine, shared = RealEngine(model, blocks=64, budget=64), text(3, 2 * BLOCK + BLOCK // 2)
    x, y = (request(name, shared + text(seed, 5), 4) for name, seed in (("x", 4), ("y", 5)))
    expected = cold.run_cold(x, y)
    assert expected[0] != expected[1]
    engine.run(request("warm", shared, 1))
    both = [request(f"{seq.request_id}{i}", seq.tokens, 4) for i in range(50) for seq in (x, y)]
    assert engine.run(*both) == expected * 50
    assert {engine.cached(seq.request_id) for seq in both} == {2 * BLOCK}


def test_two_long_prompts_that_evict_each_other_answer_as_cold(model: Path, cold: RealEngine) -> None:
    """A pool just above one of them, 20 rounds: what is claimed as cached is at most what was left."""
    engine = RealEngine(model, blocks=9, budget=64)
    a, b = (request(name, text(seed, 8 * BLOCK), 4) for name, seed in (("a", 6), ("b", 7)))
    expected = cold.run_cold(a, b)
    for _ in range(20):
        for seq, tokens in zip((a, b), expected, strict=True):
            assert engine.run(seq) == [tokens]
            assert engine.cached(seq.request_id) == 0
    assert engine.run(b) == [expected[1]]
    assert engine.cached("b") == 7 * BLOCK, "nobody came in between"


def test_a_long_prompt_in_small_chunks_streams_real_tokens_only(model: Path, cold: RealEngine) -> None:
    """15 blocks in chunks of two: no output before the prompt is done, then five tokens as unchunked."""
    engine, seq = (
        RealEngine(model, blocks=40, budget=2 * BLOCK),
        request("a", text(8, 15 * BLOCK), 5, logprobs=2),
    )
    (expected,) = cold.run_cold(seq)
    assert engine.run(seq) == [expected]
    assert engine.engine.steps == 8 + 4
    outputs = engine.outputs["a"]
    assert (
        [len(output.tokens) for output in outputs] == [len(output.logprobs) for output in outputs] == [1] * 5
    )
    for own, other in zip(engine.logprobs("a"), cold.logprobs("a"), strict=True):
        assert abs(own.logprob - other.logprob) < 1e-3
        assert [token for token, _ in own.top] == [token for token, _ in other.top]
    assert engine.sequences["a"].finish_reason is FinishReason.LENGTH


def test_penalties_seeds_and_minimums_survive_preemption(model: Path, cold: RealEngine) -> None:
    """What was generated before stays output: presence penalty, noise and min_tokens do not shift."""
    engine = RealEngine(model, blocks=10, budget=64)
    options = {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_tokens": 30}
    stops = frozenset(range(0, VOCABULARY, 3))
    asked = [
        request(f"r{i}", text(10 + i, 30), 40, seed=i, stop_token_ids=stops, **options) for i in range(4)
    ]
    expected = cold.run_cold(*asked)
    assert all(30 < len(tokens) <= 40 for tokens in expected)
    assert engine.run(*asked) == expected
    preempted = [seq for seq in engine.sequences.values() if seq.preemptions]
    assert preempted and all(seq.prompt_tokens == 30 for seq in preempted)


def conversation(engine: RealEngine, turns: int, seed: int) -> list[tuple[Sequence, list[int]]]:
    """Ask in turns, each the whole conversation so far; return every request and its answer."""
    history, done = text(seed, 20), []
    for turn in range(turns):
        end = (len(history) + 20) // BLOCK * BLOCK + turn % 3  # at a block's border, and just behind it
        seq = request(f"turn {turn}", history, end - len(history))
        (answer,) = engine.run(seq)
        done.append((seq, answer))
        history = [*history, *answer, *text(seed + turn, 5)]
    return done


def test_generated_blocks_are_found_by_the_next_turn_and_hold_what_a_cold_run_computes(
    model: Path, cold: RealEngine
) -> None:
    engine = RealEngine(model, blocks=64, budget=64)
    turns = conversation(engine, 6, 20)
    for (before, answer), (after, _) in pairwise(turns):
        computed = len(before.tokens) + len(answer) - 1  # the last token was sampled, but not computed
        assert engine.cached(after.request_id) == computed // BLOCK * BLOCK
    assert [answer for _, answer in turns] == cold.run_cold(*(seq for seq, _ in turns))
