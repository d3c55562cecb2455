"""A request inside the engine: its tokens, how far its KV is computed, and the blocks that hold it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvhive.proto.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Validated before it gets here; there are no defaults to apply."""

    max_tokens: int
    """Tokens still to generate, at least 1."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """64-bit; with the position it determines the noise, so no sampler state exists."""
    stop_token_ids: frozenset[int] = frozenset()


class SequenceState(Enum):
    """Where a sequence is; a preempted one is WAITING again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = auto()
    LENGTH = auto()
    CANCELLED = auto()
    FAILED = auto()
    """The model computed no number to sample from."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. `tokens` is prompt then output; the engine catches `num_computed` up with it.

    There is no prefill phase and no decode phase: a sequence with more than one token to compute is
    prefilling, one with exactly one is decoding, and preemption just sets `num_computed` back to 0.
    """

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    """How many of `tokens` are the request's prompt; never changes, whatever is preempted or resumed."""
    sampling: SamplingParams
    extras: bytes = b""
    """The namespace (salt, adapter) in the encoding of block_hash."""
    max_total: int = 0
    """Length at which the sequence ends: the tokens it came with plus sampling.max_tokens."""
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    """Leading tokens whose KV is in the pool."""
    block_table: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the full blocks of `tokens`, as far as they were needed."""
    registered: int = 0
    """Leading blocks of `block_table` that are in the pool's hash map."""
    cached_tokens: int | None = None
    """Tokens found in the pool at the first admission; None before it."""
    written_tokens: int = 0
    """Tokens of full prompt blocks that this sequence added to the pool."""
    preemptions: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if not self.max_total:
            self.max_total = len(self.tokens) + self.sampling.max_tokens

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.tokens) - self.num_computed
