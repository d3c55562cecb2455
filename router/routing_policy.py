"""Chooses a worker for a request: one cost, in seconds, for every candidate. Pure; the clock is not asked.

    cost(w)  = queue_s + price * compute_s + decode_s
    price(w) = 2 + 5 / (1 + victim age / 120 s)

`queue_s` is the prefill work ahead of the request, `compute_s` that of its own uncached tokens, both by
the step-time model the worker measured of itself. The price is above 1 because computing spends capacity
that others wait for, and higher where the request would evict what was used a moment ago. Costs that are
almost equal are a tie, and ties go home: by rendezvous hashing of the request's home key, so that equal
cold prompts meet on one worker, on every router alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

BASE_PRICE = 2.0
EVICTION_PRICE = 5.0
EVICTION_AGE_S = 120.0

DECODE_WEIGHT = 0.25
"""Share of a step that each sequence already decoding there is taken to cost a newcomer."""

TIE_SHARE = 0.25
TIE_S = 0.002
"""Costs within 25 % or 2 ms of the best are a tie: self-measured rates of equal workers differ by as much."""

HOME_SLACK = 1.25
"""A home that got more than this times the mean of recent cold work passes a newcomer on (rendezvous hashing
with bounded loads), so that a few unlucky hashes do not leave a worker without work."""


class RouteReason(StrEnum):
    """Why a worker was chosen."""

    ONLY = "only"
    """No other worker could take it."""
    PREFIX = "prefix"
    """It holds the longest part of the prompt."""
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
    victim_age_s: float | None
    """Seconds since its next eviction victim was last used; None while nothing is cached."""
    free_tokens: int
    """Tokens that its unused blocks hold."""
    capacity_tokens: int
    """Tokens its whole pool holds."""
    recent_cold_tokens: float
    """Uncached prompt tokens sent there lately, decayed."""
    requests: int = 0
    """Requests there, running or waiting."""


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

    @property
    def cost_s(self) -> float:
        """What is compared."""
        return self.queue_s + self.price * self.compute_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen worker, why, and the whole comparison."""

    worker_id: str
    reason: RouteReason
    costs: tuple[CandidateCost, ...] = ()
    """Of every candidate. A policy that compares otherwise may leave it to the caller, who fills it in."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Why workers of the cluster were no candidates: worker id -> reason. The caller's to fill in."""


class RoutingPolicy(Protocol):
    """Chooses among candidates.

    It runs on the event loop for every request, so it must take microseconds and wait for nothing. It may
    keep a state of its own, such as whose turn it is; it sees no clock. Workers that could never hold the
    request are not among the candidates.
    """

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """Return the decision, or None when none of the candidates should take the request now."""
        ...


class KvAwarePolicy:
    """The cost in seconds of this file's heading. Without a state: equal views decide equally."""

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """Cheapest worker; ties to the longest match, then home."""
        fitting = {c.worker_id: c for c in candidates}
        if not fitting:
            return None
        costs = compare(request, candidates)
        tied = _tied(costs)
        longest = max(c.expected_blocks for c in costs)
        if len(costs) == 1:
            chosen, reason = costs[0].worker_id, RouteReason.ONLY
        elif longest and max(c.expected_blocks for c in tied) < longest:
            chosen, reason = _home(request, tied), RouteReason.REPLICA
        elif longest:
            holders = [c for c in tied if c.expected_blocks == longest]
            chosen, reason = _home(request, holders), RouteReason.PREFIX
        else:
            chosen, reason = _cold(request, tied, fitting, _home(request, costs))
        return Decision(chosen, reason, costs)


def compare(request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[CandidateCost, ...]:
    """Return every candidate's cost, in the order given."""
    return tuple(_cost(request, candidate) for candidate in candidates)


def _cost(request: RouteRequest, candidate: Candidate) -> CandidateCost:
    cached = min(candidate.expected_blocks * request.block_size, request.prompt_tokens - 1)
    speed = candidate.speed
    uncached = request.prompt_tokens - cached
    age = candidate.victim_age_s
    evicts = age is not None and candidate.free_tokens < uncached + request.max_tokens
    eviction = EVICTION_PRICE / (1.0 + age / EVICTION_AGE_S) if evicts and age is not None else 0.0
    return CandidateCost(
        worker_id=candidate.worker_id,
        matched_blocks=candidate.matched_blocks,
        expected_blocks=candidate.expected_blocks,
        queue_s=speed.prefill_s(candidate.queue_tokens),
        compute_s=speed.prefill_s(uncached, cached),
        price=BASE_PRICE + eviction,
        decode_s=DECODE_WEIGHT * candidate.decoding * (speed.step_base_s + speed.per_token_s),
    )


def _tied(costs: Sequence[CandidateCost]) -> list[CandidateCost]:
    best = min(cost.cost_s for cost in costs)
    return [cost for cost in costs if cost.cost_s <= best + max(TIE_S, TIE_SHARE * best)]


def _cold(
    request: RouteRequest, tied: Sequence[CandidateCost], fitting: dict[str, Candidate], home: str
) -> tuple[str, RouteReason]:
    if not request.keyed:
        recent = {cost.worker_id: fitting[cost.worker_id].recent_cold_tokens for cost in tied}
        bound = HOME_SLACK * sum(recent.values()) / len(recent)
        within = [cost for cost in tied if recent[cost.worker_id] <= bound]
        if home in recent and recent[home] > bound:
            return _home(request, within), RouteReason.BALANCE
        tied = within
    chosen = _home(request, tied)
    return chosen, RouteReason.HOME if chosen == home else RouteReason.LOAD


def home_order(home_key: bytes, worker_ids: Iterable[str]) -> list[str]:
    """Rendezvous hashing: the home, then who is home without it, and so on.

    A worker that leaves or joins moves only its own keys.
    """
    key = hashlib.blake2b(home_key).digest()
    return sorted(worker_ids, key=lambda worker_id: _score(key, worker_id), reverse=True)


def _home(request: RouteRequest, costs: Sequence[CandidateCost]) -> str:
    """The first in home_order, without sorting."""
    key = hashlib.blake2b(request.home_key).digest()
    return max((cost.worker_id for cost in costs), key=lambda worker_id: _score(key, worker_id))


def _score(key: bytes, worker_id: str) -> bytes:
    return hashlib.blake2b(worker_id.encode(), key=key, digest_size=16).digest()
