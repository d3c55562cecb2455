"""Speculative decoding: a drafter guesses, the target model verifies all guesses in one step.

Verification is exact, and stronger than what it descends from. Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding" (2023), and Chen et al., "Accelerating Large Language Model Decoding
with Speculative Sampling" (2023), accept a draft x from q with probability min(1, p(x) / q(x)) and else
sample from the normalised max(0, p - q): the *distribution* of the output is the target's. Here a sampled
token is a function of (logits, options, history, seed, choice, position): the largest of logits plus Gumbel
noise. A draft is accepted exactly when it is that token, and the token itself follows the accepted drafts.
So the *tokens* are those without speculation, their distribution therefore too, and a seeded request
continues identically with or without drafts, on this worker or another. That is why coupling was chosen.

It costs nothing where the draft is a point (an n-gram): the token equals x with probability p(x), which is
rejection sampling's acceptance for q(x) = 1. A draft model draws with the very noise of the target, which
couples both draws; with equal models every draft is accepted, at any temperature. Between different models
rejection sampling would accept somewhat more (the total-variation bound, which coupling without
communication cannot always reach: Daliri, Musco, Suresh, "Coupling without Communication and
Drafter-Invariant Speculative Decoding", 2024); it would give up reproducibility for that.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ReadOnly
from dataclasses import replace

from kvhive.worker.drafter import Drafter
from kvhive.worker.model_runner import Chunk, ChunkResult, ModelRunner, ModelShape
from kvhive.worker.speculation_costs import SpeculationCosts, StepCosts


class SpeculativeRunner:
    """Implements ModelRunner around another one. A chunk that brings drafts of its own keeps them."""

    def __init__(self, target: ModelRunner, drafter: Drafter, clock: Callable[[], float]) -> None:
        """Verify with `target` what `drafter` proposes; `clock` is in seconds."""
        self._target = target
        self._drafter = drafter
        self._clock = clock
        self._costs = SpeculationCosts()

    @property
    def shape(self) -> ModelShape:
        """The target's shape."""
        return self._target.shape

    @property
    def device(self) -> str:
        """The target's device."""
        return self._target.device

    @property
    def costs(self) -> StepCosts:
        """What a step and its drafts have cost lately."""
        return self._costs.current

    overlaps = False
    """The next guess needs this step's tokens."""

    def launch(self, chunks: ReadOnly[Chunk]) -> Callable[[], list[ChunkResult]]:
        """Put all of the step off to its end."""
        return lambda: self.run(chunks)

    def run(self, chunks: ReadOnly[Chunk]) -> list[ChunkResult]:
        """Draft, then compute and verify one step; see ModelRunner."""
        began = self._clock()
        proposals = self._drafter.propose(chunks)
        drafted_at = self._clock()
        with_drafts = [_with_drafts(*pair) for pair in zip(chunks, proposals, strict=True)]
        results = self._target.run(with_drafts)
        self._costs.observe_drafting(max(map(len, proposals), default=0), drafted_at - began)
        self._costs.observe_step(with_drafts, self._clock() - drafted_at)
        return results


def _with_drafts(chunk: Chunk, proposal: list[int]) -> Chunk:
    if chunk.drafts or not proposal or chunk.sampling is None:
        return chunk
    drafts = proposal[: chunk.max_drafts]  # for more there are no blocks
    if chunk.matcher is not None:  # what its grammar does not allow would be computed for nothing
        drafts = drafts[: chunk.matcher.allows(drafts)]
    return replace(chunk, drafts=drafts)
