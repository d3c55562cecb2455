"""What a step and its drafts cost, learnt from the steps that a speculative runner runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass

from kvhive.worker.model_runner import Chunk
from kvhive.worker.step_time import StepTimeModel

REMEMBERED_ROUNDS = 32
"""Steps over which the price of a draft is taken; enough for a median, few enough to forget a busy minute."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds; zeros where nothing has been measured."""

    base_s: float = 0.0
    """Of a step before any token."""
    per_token_s: float = 0.0
    """Of each token that a step computes, drafts included."""
    per_draft_s: float = 0.0
    """Of one more draft for every sequence of the step, in the drafter."""
    batch: int = 1
    """Sequences that the last step sampled for: they share `base_s` and `per_draft_s`."""


class SpeculationCosts:
    """Keeps StepCosts up to date. The engine's own step-time model cannot: it does not see the drafts."""

    def __init__(self) -> None:
        self._steps = StepTimeModel()
        self._draft_s: deque[float] = deque(maxlen=REMEMBERED_ROUNDS)
        self._batch = 1

    def observe_drafting(self, longest: int, seconds: float) -> None:
        """Learn from one call of the drafter, whose longest proposal had `longest` tokens."""
        if longest:
            self._draft_s.append(seconds / longest)

    def observe_step(self, chunks: ReadOnly[Chunk], seconds: float) -> None:
        """Learn from one step of the target."""
        lengths = [len(chunk.token_ids) + len(chunk.drafts) for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        pairs = sum(n * (start + (n + 1) // 2) for n, start in zip(lengths, starts, strict=True))
        self._steps.observe(sum(lengths), pairs, max(seconds, 1e-9))
        self._batch = max(1, sum(chunk.sampling is not None for chunk in chunks))

    @property
    def current(self) -> StepCosts:
        """The costs as of the last step."""
        base, per_token, _ = self._steps.coefficients
        # The lower median: a step in which another sequence's prompt was caught up must not set the price.
        rounds = sorted(self._draft_s)
        per_draft = rounds[(len(rounds) - 1) // 2] if rounds else 0.0
        return StepCosts(base, per_token, per_draft, self._batch)
