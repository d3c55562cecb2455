"""Speculation changes how many steps a generation takes, and nothing else."""

from __future__ import annotations

import random

import pytest
from speculation_rig import Bench, Generation, ScriptedDrafter

from kvhive.worker.model_runner import Chunk
from kvhive.worker.ngram_drafter import NgramDrafter
from kvhive.worker.sequence import SamplingParams
from kvhive.worker.simulated_runner import SimulatedRunner
from kvhive.worker.speculative_runner import SpeculativeRunner

BLOCKS = 512
SCRIPTS = {
    "right": lambda length, index: True,
    "wrong": lambda length, index: False,
    "half right": lambda length, index: (length + index) % 2 == 0,
    "first right": lambda length, index: index == 0,
}


def make(script, clock=lambda: 0.0):
    target = SimulatedRunner(BLOCKS, 4)
    drafter = ScriptedDrafter(target.next_token, SCRIPTS[script])
    return SpeculativeRunner(target, drafter, clock)


def generations(count=5, max_tokens=23):
    rng = random.Random(3)
    return [
        Generation(
            [rng.randrange(900) for _ in range(rng.randint(1, 40))], SamplingParams(max_tokens, choice=i % 3)
        )
        for i in range(count)
    ]


def expected(generation):
    runner, tokens = SimulatedRunner(1, 4), list(generation.history)
    for _ in range(generation.sampling.max_tokens):
        tokens.append(runner.next_token(tokens, generation.sampling))
    return tokens[len(generation.history) :]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("max_drafts", [1, 4, 7])
def test_the_tokens_are_those_without_speculation(script, max_drafts) -> None:
    """Prefills and decodes in one batch, block borders crossed, exactly max_tokens each."""
    wanted = [expected(generation) for generation in generations()]
    assert Bench(make(script), max_drafts).run(generations()) == wanted


@pytest.mark.parametrize(
    ("script", "drafted", "accepted", "steps"),
    [
        # 1 token by the prompt's step; then 5 tokens a step, and the last step is cut to the room of 20 % 5
        ("right", 16, 16, 1 + 4),
        # every step drafts as many as there is room for: 4 each, then 3, 2, 1, 0
        ("wrong", 4 * 16 + 3 + 2 + 1, 0, 1 + 20),
        # 2 tokens a step, 10 steps; the room before each is 19, 17, ... 1
        ("first right", 4 * 8 + 3 + 1, 10, 1 + 10),
    ],
)
def test_the_counters_are_exact(script, drafted, accepted, steps) -> None:
    runner = make(script)
    (generation,) = [Generation([1, 2, 3], SamplingParams(21))]
    Bench(runner, 4).run([generation])
    assert (generation.drafted, generation.accepted, generation.steps) == (drafted, accepted, steps)


def test_a_drafter_that_says_too_much_is_cut_to_the_room_there_is() -> None:
    """Beyond `max_drafts` there are no blocks, and the sequence may end there."""
    target = SimulatedRunner(BLOCKS, 4)

    class Talkative:
        def propose(self, chunks):
            return [[7] * 50 for _ in chunks]

    runner = SpeculativeRunner(target, Talkative(), lambda: 0.0)
    prompt, sampling = [1, 2, 3], SamplingParams(3)
    asked = [
        Chunk(prompt, 0, [0], None),
        Chunk(prompt, 0, [1], sampling, history=prompt, max_drafts=1),
        Chunk(prompt, 0, [2], sampling, history=prompt),
    ]
    assert [result.drafted for result in runner.run(asked)] == [0, 1, 0]


def test_drafts_that_a_chunk_brings_along_are_kept() -> None:
    runner, prompt = make("wrong"), [1, 2, 3]
    follows = SimulatedRunner(1, 4).next_token(prompt)
    chunk = Chunk(prompt, 0, [0], SamplingParams(3), history=prompt, max_drafts=1, drafts=[follows])
    (result,) = runner.run([chunk])
    assert (result.tokens[0], len(result.tokens), result.drafted) == (follows, 2, 1)


def test_a_generation_that_fails_takes_no_other_with_it() -> None:
    bad = Generation([5, SimulatedRunner.POISON], SamplingParams(8))
    good = generations(1)[0]
    Bench(make("right"), 4).run([bad, good])
    assert bad.failed and good.output == expected(generations(1)[0])


def test_what_steps_and_drafts_cost_is_measured_apart() -> None:
    """2 ms a step, 1 ms a token (drafts too), 3 ms a draft."""
    now = [0.0]

    def spend(seconds):
        now[0] += seconds

    target = SimulatedRunner(BLOCKS, 4, on_step=lambda tokens, pairs: spend(0.002 + 0.001 * tokens))
    script = ScriptedDrafter(target.next_token, SCRIPTS["half right"], lambda drafts: spend(0.003 * drafts))
    runner = SpeculativeRunner(target, script, lambda: now[0])
    Bench(runner, 4).run(generations())
    costs = runner.costs
    assert costs.base_s == pytest.approx(0.002, rel=0.05)
    assert costs.per_token_s == pytest.approx(0.001, rel=0.05)
    assert costs.per_draft_s == pytest.approx(0.003)


def test_the_shape_and_device_are_the_targets() -> None:
    runner = make("right")
    assert (runner.shape, runner.device) == (SimulatedRunner(1, 4).shape, "simulated")


def test_ngrams_draft_what_a_simulated_model_repeats() -> None:
    """A model that counts in a circle: after one round every draft is right."""

    class Circle(SimulatedRunner):
        def next_token(self, tokens, sampling=None, prompt_tokens=0):
            return (tokens[-1] + 1) % 10

    runner = SpeculativeRunner(Circle(BLOCKS, 4), NgramDrafter(), lambda: 0.0)
    generation = Generation(list(range(10)) * 2, SamplingParams(101))
    Bench(runner, 4).run([generation])
    assert generation.output == [i % 10 for i in range(101)]
    assert generation.accepted == generation.drafted == 80
