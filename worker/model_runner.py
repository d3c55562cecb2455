"""The seam between scheduling and computing: what one step asks for and what it answers.

Implementations: `TorchModelRunner` (torch_runner.py) computes; `SimulatedRunner` (simulated_runner.py)
pretends, on a cost model. Scheduler, pool and engine know only this file, and import no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass
from typing import Protocol

from kvhive.proto.errors import KvhiveError
from kvhive.worker.output_matcher import OutputMatcher
from kvhive.worker.sequence import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the model itself (before any sampling option)."""

    logprob: float
    """Of the token that stands there."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the likeliest tokens, best first, ties to the lower id."""


@dataclass(slots=True)  # made by the hundred in each step: frozen ones cost thrice
class Chunk:
    """The part of one sequence that a step computes: tokens[start : start + len(token_ids)], then drafts."""

    token_ids: ReadOnly[int]
    start: int
    """Position of the first of `token_ids`; the KV of all positions before it is in the pool."""
    block_table: ReadOnly[int]
    """Block ids that cover positions 0 .. start + len(token_ids) + max(max_drafts, len(drafts)) - 1."""
    sampling: SamplingParams | None
    """Set when this chunk reaches the end of the sequence, so that the step samples what follows."""
    history: ReadOnly[int] = ()
    """All tokens of the sequence up to the end of this chunk; what penalties count. Only with `sampling`."""
    prompt_tokens: int = 0
    """How many of `history` are the prompt."""
    max_drafts: int = 0
    """Drafts that a speculating runner may add; the scheduler has reserved blocks and budget for them."""
    drafts: ReadOnly[int] = ()
    """Guesses at what follows `token_ids`, to be verified in this step."""
    prompt_logprobs: int | None = None
    """Report log-probabilities of the tokens after each of `token_ids` but the last, with so many
    alternatives; and of `next_prompt_token` after the last, when it is given."""
    next_prompt_token: int | None = None
    matcher: OutputMatcher | None = None
    """Where the output up to the end of this chunk is in its grammar; the step leads it on by the tokens that
    it answers. Only with `sampling`."""


@dataclass(slots=True)  # made by the hundred in each step: frozen ones cost thrice
class ChunkResult:
    """What a step did for one chunk."""

    tokens: ReadOnly[int] = ()
    """What follows the chunk: one sampled token, after as many accepted drafts as it agreed with. Empty
    where nothing was to be sampled."""
    logprobs: ReadOnly[TokenLogprobs] = ()
    """One per token, where sampling.logprobs asked."""
    prompt_logprobs: ReadOnly[TokenLogprobs] = ()
    drafted: int = 0
    """Drafts that were verified in this step."""
    failed: bool = False
    """The logits are not finite: the sequence has failed, and only that one; its KV must not be shared."""
    reason: KvhiveError | None = None
    """Why it has failed, where it is something else."""
    ends_at: int = 0
    """After so many of `tokens` its grammar lets nothing follow; 0: something may."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine must know of a model to size a pool and to refuse a request."""

    vocab_size: int
    max_context: int
    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_element: int
    """Of K and V in the pool."""

    def block_bytes(self, block_size: int) -> int:
        """Bytes of K and V of all layers of one block."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_element * block_size


class ModelRunner(Protocol):
    """Writes the KV of each chunk into the pool and samples where asked.

    Called from one thread, one step at a time; a step returns one result per chunk, in order. When it has,
    the KV of every chunk is written, and that of every accepted draft. Whatever it raises ends the engine:
    the pool's content is not known any more.

    Sampling is a function of (logits, options, history, seed, choice, position) alone, and a grammar of the
    history. So a draft is accepted exactly when it is the token that would have been sampled, and speculation
    changes nothing.
    """

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        ...

    @property
    def device(self) -> str:
        """Name of the device for people, such as `cpu` or `cuda:0 NVIDIA H200`."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether the host is free between `launch` and the end of the step."""
        ...

    def launch(self, chunks: ReadOnly[Chunk]) -> Callable[[], list[ChunkResult]]:
        """Begin one step, and return what waits for its end. Nothing else is asked of it until then."""
        ...

    def run(self, chunks: ReadOnly[Chunk]) -> list[ChunkResult]:
        """Compute one step: launch, and wait."""
        ...
