"""Drafts are tried where they pay, in seconds of a virtual clock, and hardly anywhere else."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from speculation_rig import Bench, Generation, ScriptedDrafter

from kvhive.worker.model_runner import Chunk
from kvhive.worker.sequence import SamplingParams, Sequence
from kvhive.worker.simulated_runner import SimulatedRunner
from kvhive.worker.speculation_control import LAST_PROBE, SpeculationControl
from kvhive.worker.speculation_costs import StepCosts
from kvhive.worker.speculative_runner import SpeculativeRunner

MEMORY_BOUND = StepCosts(base_s=0.010, per_token_s=0.0002, per_draft_s=0.0001)
COMPUTE_BOUND = StepCosts(base_s=0.0001, per_token_s=0.010, per_draft_s=0.0001)


def sequence(name="a", **options):
    return Sequence(name, [1, 2, 3], 3, SamplingParams(10_000, **options))


def play(control, seq, right, steps, silent=lambda step: False):
    """Steps in which each draft is right with probability `right`; return the drafts of each step."""
    rng, tried = random.Random(2), []
    for step in range(steps):
        drafts = control.drafts_for(seq)
        tried.append(drafts)
        if not silent(step):
            seq.drafted += drafts
            for _ in range(drafts):
                if rng.random() >= right:
                    break
                seq.accepted += 1
    return tried


def test_right_drafts_are_asked_for_in_full_where_a_step_costs_more_than_a_token() -> None:
    assert set(play(SpeculationControl(6, lambda: MEMORY_BOUND), sequence(), 1.0, 50)[1:]) == {6}


def test_without_measurements_drafts_are_tried() -> None:
    assert SpeculationControl(5, StepCosts).drafts_for(sequence()) > 0


def test_a_request_can_say_no() -> None:
    control = SpeculationControl(5, lambda: MEMORY_BOUND)
    assert control.drafts_for(sequence(speculate=False)) == 0


@pytest.mark.parametrize(
    "costs",
    [COMPUTE_BOUND, replace(MEMORY_BOUND, per_draft_s=0.02), replace(MEMORY_BOUND, batch=64)],
    ids=["every token costs a step", "the drafter is slower than a step", "the batch is full"],
)
def test_where_drafts_do_not_pay_nearly_none_are_tried(costs) -> None:
    """Right half of the time: not enough. Only single probes are left, ever more rarely."""
    tried = play(SpeculationControl(4, lambda: costs), sequence(), 0.5, 2000)
    assert set(tried[50:]) <= {0, 1}
    assert sum(tried[50:1000]) >= 3 and sum(tried[1000:]) <= 1000 / LAST_PROBE + 1


def test_wrong_drafts_are_given_up_within_a_few_steps() -> None:
    tried = play(SpeculationControl(4, lambda: MEMORY_BOUND), sequence(), 0.0, 600)
    assert tried[0] > 0 and sum(tried) <= 40


def test_a_sequence_that_becomes_repetitive_is_found_out_by_a_probe() -> None:
    control, seq = SpeculationControl(4, lambda: MEMORY_BOUND), sequence()
    play(control, seq, 0.0, 200)
    tried = play(control, seq, 1.0, 2 * LAST_PROBE + 50)
    assert tried[-20:] == [4] * 20


def test_a_probe_waits_until_the_drafter_has_an_idea() -> None:
    """A drafter that says nothing has not been wrong."""
    control, seq = SpeculationControl(4, lambda: COMPUTE_BOUND), sequence()
    tried = play(control, seq, 0.5, 300, silent=lambda step: step > 30)
    assert tried[-1] == 1


def test_more_drafts_are_tried_the_more_of_them_are_right() -> None:
    asked = []
    for right in (0.3, 0.6, 0.95):
        tried = play(SpeculationControl(12, lambda: MEMORY_BOUND), sequence(), right, 400)
        asked.append(sum(tried[200:]) / 200)
    assert asked[0] < asked[1] < asked[2]


def test_sequences_are_judged_apart_and_new_ones_by_the_workers_average() -> None:
    control = SpeculationControl(4, lambda: MEMORY_BOUND)
    good, bad = sequence("good"), sequence("bad")
    for _ in range(100):
        play(control, good, 1.0, 1)
        play(control, bad, 0.0, 1)
    assert control.drafts_for(good) == 4
    assert control.drafts_for(bad) <= 1, "at most a probe"
    for number in range(30):
        play(control, sequence(f"bad {number}"), 0.0, 30)
    assert control.drafts_for(sequence("new")) < 4
    assert control.acceptance < 0.3


def test_another_sequence_of_the_same_name_starts_afresh() -> None:
    control = SpeculationControl(4, lambda: MEMORY_BOUND)
    play(control, sequence("good"), 1.0, 100)
    play(control, sequence("a"), 0.0, 100)
    assert control.drafts_for(sequence("a")) > 0


@dataclass
class Cost:
    """What a step, a token and a draft cost in virtual seconds."""

    base: float
    token: float
    draft: float


def virtual_seconds(cost, right, speculating):
    """How long 400 tokens take on a simulated model with a drafter that is so often right."""
    now, rng = [0.0], random.Random(4)

    def spend(seconds):
        now[0] += seconds

    target = SimulatedRunner(256, 4, on_step=lambda tokens, pairs: spend(cost.base + cost.token * tokens))
    drafter = ScriptedDrafter(
        target.next_token, lambda length, index: rng.random() < right, lambda n: spend(cost.draft * n)
    )
    runner = SpeculativeRunner(target, drafter, lambda: now[0])
    for count in (16, 64, 256):  # the engine calibrates so before it serves
        runner.run([Chunk([0] * count, 0, range(64), None)])
        runner.run([Chunk([0], count - 1, range(64), None)])
    now[0] = 0.0
    control = SpeculationControl(4, lambda: runner.costs)
    seq, generation = sequence(), Generation([1, 2, 3], SamplingParams(400))

    class Controlled(Bench):
        def _next(self, generation):
            seq.drafted, seq.accepted = generation.drafted, generation.accepted
            self.max_drafts = control.drafts_for(seq) if speculating else 0
            return super()._next(generation)

    Controlled(runner).run([generation])
    return now[0]


def test_it_pays_where_it_can_and_costs_little_where_it_cannot() -> None:
    """On a clock that knows the costs only through the steps: twice as fast, or within 3 % of plain."""
    memory_bound, compute_bound = Cost(0.010, 0.0005, 0.0005), Cost(0.0001, 0.010, 0.0005)
    slow_drafter = Cost(0.010, 0.0005, 0.012)
    assert virtual_seconds(memory_bound, 0.9, True) < virtual_seconds(memory_bound, 0.9, False) / 2
    for cost, right in ((memory_bound, 0.0), (compute_bound, 0.5), (slow_drafter, 0.5)):
        assert virtual_seconds(cost, right, True) < 1.03 * virtual_seconds(cost, right, False)
