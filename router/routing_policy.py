"""Choosing a worker: what a policy is told, and what it answers. The contract, and nothing else.

Implementations: policies/, one file each, made by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class RouteReason(StrEnum):
    """Why a worker was chosen."""

    ONLY = "only"
    """No other worker could take it."""
    PREFIX = "prefix"
    """It holds the longest part of the prompt, or all of that part but a little."""
    HOME = "home"
    """A tie that went to the home of the prompt or of its cache_key."""
    BALANCE = "balance"
    """A tie whose home had more than its share of recent cold work."""
    LOAD = "load"
    """It is the less busy one: the home would have been slower."""
    REPLICA = "replica"
    """Another worker holds more of the prompt but would have been slower: the prefix gets a second place."""
    TURN = "turn"
    """It was its turn (round robin)."""
    POLICY = "policy"
    """For a policy of the operator's own, which has no better word."""


@dataclass(frozen=True, slots=True)
class Speed:
    """A worker's own step-time model, in seconds; see worker/step_time.py."""

    step_base_s: float
    per_token_s: float
    per_attention_s: float
    max_step_tokens: int

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """Seconds to compute `tokens` after `context` tokens that are there already."""
        steps = -(-tokens // self.max_step_tokens)
        pairs = tokens * (context + tokens / 2)
        return steps * self.step_base_s + tokens * self.per_token_s + pairs * self.per_attention_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A routable worker, as the policy sees it."""

    worker_id: str
    matched_blocks: int
    """Leading blocks the index says it holds."""
    expected_blocks: int
    """At least matched_blocks: with those that requests on their way there will create."""
    queue_tokens: int
    """Prompt tokens that will be computed there before this request's."""
    decoding: int
    """Sequences in its batch."""
    speed: Speed
    victim_reuse: float
    """How likely a block that it evicts would have been hit, by its own count."""
    free_tokens: int
    """Tokens that its unused blocks hold."""
    capacity_tokens: int
    """Tokens its whole pool holds."""
    recent_cold_tokens: float
    """Uncached prompt tokens sent there lately, decayed."""
    requests: int = 0
    """Requests there, running or waiting."""
    most_running: int = 0
    """How many of them can run at once; 0: not known."""
    live_tokens: int = 0
    """Tokens whose blocks requests there use or are about to, which no newcomer can evict."""
    shared_tokens: int = 0
    """Of those, tokens of the very prompt that is routed, as far as it is known and room is short."""
    growth_tokens: float = 0.0
    """What its running requests are expected to generate yet."""
    release_tokens: float = 0.0
    """What one of them is, weighted by what it holds."""
    answer_tokens: float = 0.0
    """The mean length of answers there."""
    cold_tokens_per_s: float = 0.0
    """Uncached prompt tokens that it has got per second, of late, from everybody."""
    block_bytes: int = 0
    """What one block is to a transfer; 0 where blocks do not move."""
    pull_latency_s: float = 0.0
    """What a pull to it takes whatever its size."""
    pull_bytes_per_s: float = 0.0
    """How fast blocks come to it from other workers; 0 while not measured."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What the policy must know of a request."""

    prompt_tokens: int
    max_tokens: int
    block_size: int
    home_key: bytes
    """Namespace and cache_key, or namespace and the first blocks: what ties are broken by."""
    keyed: bool = False
    """Whether the home key is a caller's cache_key; such a home is not bounded by recent load."""


@dataclass(frozen=True, slots=True)
class CandidateCost:
    """One candidate's comparison, kept for explanations."""

    worker_id: str
    matched_blocks: int
    expected_blocks: int
    queue_s: float
    compute_s: float
    price: float
    decode_s: float
    room_s: float = 0.0
    pull_s: float = 0.0
    """Of compute_s, the pull from the worker that holds the most; 0 where computing is faster."""
    pulled_blocks: int = 0
    """Leading blocks that it has after that."""

    @property
    def cost_s(self) -> float:
        """What is compared."""
        return self.queue_s + self.room_s + self.price * self.compute_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen worker, why, and the whole comparison."""

    worker_id: str
    reason: RouteReason
    costs: Sequence[CandidateCost] = ()
    """Of every candidate. A policy that compares otherwise may leave it to the caller, who fills it in."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Why workers of the cluster were no candidates: worker id -> reason. The caller's to fill in."""
    pull_from: str = ""
    """The worker that it is to pull the prompt's beginning from; empty: from nobody. The caller's, too."""


class RoutingPolicy(Protocol):
    """Chooses among candidates.

    It runs on the event loop for every request, so it must take microseconds and wait for nothing. It may
    keep a state of its own, such as whose turn it is; it sees no clock. Workers that could never hold the
    request are not among the candidates.
    """

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """Return the decision, or None when none of the candidates should take the request now."""
        ...
