"""Speculation under a real scheduler and pool: same tokens, same ends, clean blocks, nothing past the end."""

from __future__ import annotations

import random

import pytest
from engine_rig import Rig
from speculation_rig import ScriptedDrafter

from kvhive.worker.draft_model import DraftModel
from kvhive.worker.engine import Engine, EngineHooks
from kvhive.worker.ngram_drafter import NgramDrafter
from kvhive.worker.scheduler import Scheduler
from kvhive.worker.sequence import FinishReason
from kvhive.worker.simulated_runner import SimulatedRunner
from kvhive.worker.speculation_control import SpeculationControl
from kvhive.worker.speculation_costs import StepCosts
from kvhive.worker.speculative_runner import SpeculativeRunner

BLOCK_SIZE = 4


class SpeculatingRig(Rig):
    """Every step that can drafts; the rig itself compares each token and the accounting after every step."""

    def __init__(self, blocks: int, drafter, max_drafts: int = 4, budget: int = 32) -> None:
        super().__init__(blocks, BLOCK_SIZE, budget)
        self.runner = SimulatedRunner(blocks, BLOCK_SIZE)
        self.drafter = drafter(self.runner)
        runner = SpeculativeRunner(self.runner, self.drafter, lambda: self.now)
        control = SpeculationControl(max_drafts, StepCosts)
        self.scheduler = Scheduler(self.manager, self.scheduler.limits, control.drafts_for)
        hooks = EngineHooks(self._deliver, self._publish)
        self.engine = Engine(runner, self.scheduler, hooks, lambda: self.now)

    @property
    def drafted(self):
        return self.engine.load.drafted_tokens

    @property
    def accepted(self):
        return self.engine.load.accepted_tokens


def scripted(right):
    return lambda runner: ScriptedDrafter(runner.next_token, right)


RIGHT = scripted(lambda length, index: True)
HALF_RIGHT = scripted(lambda length, index: (length + index) % 2 == 0)


def same_model(blocks):
    return lambda runner: DraftModel(
        SimulatedRunner(blocks, BLOCK_SIZE), runner.shape, blocks, BLOCK_SIZE, 64
    )


def test_rejected_drafts_leave_no_trace_in_cached_blocks() -> None:
    """Ten turns, each on the cached blocks of the last; whatever they read is what was accepted."""
    rig, rng = SpeculatingRig(128, HALF_RIGHT), random.Random(1)
    tokens = [rng.randrange(900) for _ in range(21)]
    for turn in range(10):
        name = f"turn {turn}"
        rig.submit(name, tokens, max_tokens=4 * BLOCK_SIZE + turn)
        rig.run()
        assert rig.tokens(name) == rig.expected(name, 4 * BLOCK_SIZE + turn)
        if turn:
            assert rig.cached(name) >= (len(tokens) - 6 - BLOCK_SIZE) // BLOCK_SIZE * BLOCK_SIZE
        tokens = [*tokens, *rig.tokens(name), *(rng.randrange(900) for _ in range(5))]
    assert 0 < rig.accepted < rig.drafted


def test_acceptance_does_not_drift_over_turns_nor_after_preemption() -> None:
    """A model that drafts for itself is always right, whatever happened to the blocks in between."""
    rig, rng = SpeculatingRig(40, same_model(40)), random.Random(2)
    conversations = [[rng.randrange(900) for _ in range(rng.randint(3, 30))] for _ in range(4)]
    for turn in range(10):
        names = [f"{number}/{turn}" for number in range(len(conversations))]
        for name, tokens in zip(names, conversations, strict=True):
            rig.submit(name, tokens[-60:], max_tokens=rng.randint(5, 30))
        rig.run()
        for name, tokens in zip(names, conversations, strict=True):
            tokens.extend([*rig.tokens(name), rng.randrange(900)])
    assert rig.scheduler.preemptions > 0
    assert rig.accepted == rig.drafted > 500


@pytest.mark.parametrize("short", [0, 1, 2, 3])
@pytest.mark.parametrize("drafter", [RIGHT, HALF_RIGHT], ids=["right", "half right"])
def test_nothing_is_drafted_past_the_end_of_the_context(short: int, drafter) -> None:
    """A prompt that leaves room for a few tokens of the pool: as many come, with finish `length`."""
    rig = SpeculatingRig(8, drafter)
    room = 1 + short
    seq = rig.submit("a", range(8 * BLOCK_SIZE - room), max_tokens=room)
    rig.run()
    assert rig.tokens("a") == rig.expected("a", room)
    assert seq.finish_reason is FinishReason.LENGTH
    assert rig.drafted <= max(0, (room - 1) * (room - 2) // 2)


def test_nothing_comes_after_a_stop_token_in_the_middle_of_accepted_drafts() -> None:
    """Tokens, log-probabilities and counters all end where the answer ends."""
    rig = SpeculatingRig(64, RIGHT)
    rig.submit("plain", [1, 2, 3], max_tokens=12)
    rig.run()
    stop = rig.tokens("plain")[3]
    seq = rig.submit("a", [1, 2, 3], max_tokens=12, stop=[stop], logprobs=2)
    rig.run()
    assert rig.tokens("a") == rig.tokens("plain")[:4]
    assert sum(len(output.logprobs) for output in rig.outputs["a"]) == 4
    assert seq.finish_reason is FinishReason.STOP
    assert seq.accepted == 2


def test_log_probabilities_belong_to_their_tokens_in_a_mixed_batch() -> None:
    """Three that decode with drafts beside a long prompt in chunks: the same as without speculation."""
    answers = []
    for rig in (Rig(256, BLOCK_SIZE, 12), SpeculatingRig(256, HALF_RIGHT, budget=12)):
        for number in range(3):
            rig.submit(f"{number}", [number, 5], max_tokens=15, logprobs=2)
        rig.run(steps=3)
        rig.submit("long", range(150), max_tokens=5)
        rig.run()
        outputs = [rig.outputs[f"{number}"] for number in range(3)]
        answers.append([[logprob for part in parts for logprob in part.logprobs] for parts in outputs])
    assert answers[0] == answers[1]


def test_a_request_that_says_no_gets_no_drafts() -> None:
    rig = SpeculatingRig(64, RIGHT)
    seq = rig.submit("a", [1, 2, 3], max_tokens=9, speculate=False)
    rig.run()
    assert (seq.drafted, rig.drafted) == (0, 0)
    assert rig.tokens("a") == rig.expected("a", 9)


def test_ngrams_are_indexed_once_per_sequence() -> None:
    """The scheduler shows the drafter one growing history, so that a step costs what it adds."""
    rig = SpeculatingRig(64, lambda runner: NgramDrafter())
    rig.submit("a", range(20), max_tokens=30)
    rig.run()
    assert rig.tokens("a") == rig.expected("a", 30)
    assert 20 < rig.drafter.indexed_tokens <= 50
