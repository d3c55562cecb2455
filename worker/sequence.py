"""A request inside the engine: its tokens, how far its KV is computed, and the blocks that hold it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvhive.proto.block_hash import BlockHash
from kvhive.worker.output_matcher import OutputMatcher


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output must be; see proto/grammar.py."""

    kind: str
    text: str


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
    typical_p: float = 1.0
    """Keep the most typical tokens with this much probability (locally typical sampling); 1 keeps all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1 changes nothing."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    seed: int = 0
    """64-bit; with choice and position it determines the noise, so no sampler state exists."""
    choice: int = 0
    """Which of a request's n answers this is: its own stream of noise."""
    min_tokens: int = 0
    """No stop token is sampled before this many tokens of output."""
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    """Report the log-probability of each output token, with this many alternatives; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. Such a request takes nothing from the cache: it needs the logits."""
    speculate: bool = True
    """Whether drafts may be tried. They never change what is generated."""
    grammar: Grammar | None = None
    """None leaves the output free. Else the sequence has a matcher, which follows it."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the full blocks of the first `tokens` prompt tokens for `ttl_s` seconds after their last use."""

    tokens: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class BlockSource:
    """Another worker that holds the beginning of a prompt: where to pull it from."""

    worker_id: str
    address: str
    """host:port of its kvhive.v1.Worker service."""
    epoch: int
    blocks: int
    """Leading blocks that it is said to hold."""


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
    priority: int = 0
    """Higher goes first; ages upward while waiting."""
    tenant: str = ""
    """Whose share of the budget it takes."""
    moved: bool = False
    """Whether another worker had it before, which was lost."""
    after: Sequence | None = None
    """For choices 1..n-1 of a request: the sequence whose prompt they share, and wait for."""
    pins: tuple[Pin, ...] = ()
    """What of its prompt is to stay in the cache, and how long."""
    extras: bytes = b""
    """The namespace (salt, adapter) in the encoding of block_hash."""
    matcher: OutputMatcher | None = None
    """Where its output is in `sampling.grammar`."""
    source: BlockSource | None = None
    """Who is said to hold more of the prompt, and to bring it faster than it is computed."""
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
    arrived: range = range(0)
    """Places of the leading blocks that came from another worker for it. They are no hits."""
    incoming_tokens: int = 0
    """Prompt tokens that are on their way here from another worker."""
    cached_tokens: int | None = None
    """Tokens found in the pool at the first admission, without those that came for it; None before."""
    pulled_tokens: int = 0
    """Tokens that came for it from another worker, and were not computed."""
    written_tokens: int = 0
    """Tokens of full prompt blocks that this sequence added to the pool."""
    pinned_tokens: int | None = None
    """Tokens of the full blocks that its pins keep; None until its prompt is computed."""
    pins_refused: str = ""
    """Why one of them is not kept."""
    prompt_ready: bool = False
    """Whether its prompt has been computed once, so that others find it in the cache."""
    prompt_scored: int = 0
    """Last prompt position whose log-probability was reported: preemption must not repeat them."""
    drafted: int = 0
    """Drafts that were verified for it."""
    accepted: int = 0
    """Of those, the ones that became output."""
    waiting_since: float = 0.0
    """When it arrived or was last preempted, in seconds of the scheduler's clock."""
    ticket: int = 0
    """Its number in the order of arrival."""
    preemptions: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if not self.max_total:
            self.max_total = len(self.tokens) + self.sampling.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be reported. Until then it takes no hits."""
        asked = self.sampling.prompt_logprobs is not None
        return asked and self.prompt_scored < self.prompt_tokens - 1

    @property
    def returns(self) -> bool:
        """Whether it ran before, here or elsewhere: somebody may be in the middle of its answer."""
        return self.moved or self.preemptions > 0

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.tokens) - self.num_computed
