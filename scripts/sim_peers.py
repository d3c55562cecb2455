"""What other routers would have chosen: their costs restated over the same candidates, to compare with.

Restated in our own words after their public code (docs/simulate.md says which, and what differs). They get
better facts here than at home: the same precise index and predictions as our own policy where they have
an approximate tree, and queue and cache use without the delay of a scrape. None of this is for production.

    longest_prefix   longest match; ties to the least loaded
    predicted_ttft   queue + computing, in seconds
    queue_3_uncached queue + 3 x computing, in seconds
    dynamo           prefill blocks - overlap + decode blocks                      (NVIDIA Dynamo, KV router)
    sglang           the longest match if it is over half of the prompt, unless load is uneven
                                                                        (SGLang's router, cache_aware policy)
    llm_d            3 x matched share + 2 x short queue + 2 x unused cache + 2 x longest without new prompts
                                                                   (llm-d, its precise prefix cache guide)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvhive.proto.block_hash import BlockKey
from kvhive.router.routing_policy import Candidate, Decision, RouteReason, RouteRequest, RoutingPolicy

SGLANG_MATCH_SHARE = 0.5
SGLANG_UNEVEN_BY = 32
SGLANG_UNEVEN_TIMES = 1.1

LLMD_PREFIX_WEIGHT = 3.0
LLMD_QUEUE_WEIGHT = 2.0
LLMD_CACHE_WEIGHT = 2.0
LLMD_NO_HIT_WEIGHT = 2.0


@dataclass(slots=True)
class PeerFacts:
    """What some of them know beyond a Candidate; the simulator keeps it true."""

    waiting: dict[str, int] = field(default_factory=dict)
    """Requests not admitted, by worker."""
    used_share: dict[str, float] = field(default_factory=dict)
    """Of the pool's blocks, those that requests use, by worker."""
    arriving: Sequence[BlockKey] = ()
    """The blocks of the prompt that is being placed."""
    active: dict[str, Counter[BlockKey]] = field(default_factory=dict)
    """Prompt blocks of the requests at each worker, and how many of them share each."""
    cold: bool = False
    """Whether nobody holds any of the prompt that is being placed."""
    cold_order: dict[str, None] = field(default_factory=dict)
    """The workers that got such prompts, who got one longest ago first."""

    def enter(self, worker_id: str, keys: Sequence[BlockKey]) -> None:
        """A request is placed."""
        if self.cold:
            self.cold_order.pop(worker_id, None)
            self.cold_order[worker_id] = None
        self.active.setdefault(worker_id, Counter()).update(keys)

    def leave(self, worker_id: str, keys: Sequence[BlockKey]) -> None:
        """It has ended."""
        active = self.active[worker_id]
        for key in keys:
            if active[key] == 1:
                del active[key]
            else:
                active[key] -= 1


Score: TypeAlias = Callable[[RouteRequest, Sequence[Candidate], PeerFacts], Sequence[float]]
"""One number per candidate; the smallest is chosen."""


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """A RoutingPolicy that takes the lowest score, and of equal ones the worker with the least to do."""

    score: Score
    facts: PeerFacts

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision | None:
        """See RoutingPolicy."""
        if not candidates:
            return None
        scores = self.score(request, candidates, self.facts)
        ranked = zip(scores, candidates, strict=True)
        self.facts.cold = not any(candidate.expected_blocks for candidate in candidates)
        _, best = min(ranked, key=lambda pair: (pair[0], pair[1].requests, pair[1].queue_tokens))
        return Decision(best.worker_id, RouteReason.PREFIX if best.expected_blocks else RouteReason.LOAD)


def peer_names() -> tuple[str, ...]:
    """The policies of this file."""
    return tuple(_SCORES)


def make_peer(name: str, facts: PeerFacts) -> RoutingPolicy:
    """Make one of them. Raises KeyError."""
    return PeerPolicy(_SCORES[name], facts)


def _queue_s(candidate: Candidate) -> float:
    return candidate.speed.prefill_s(candidate.queue_tokens)


def _compute_s(request: RouteRequest, candidate: Candidate) -> float:
    cached = min(candidate.expected_blocks * request.block_size, request.prompt_tokens - 1)
    return candidate.speed.prefill_s(request.prompt_tokens - cached, cached)


def _longest_prefix(
    request: RouteRequest, candidates: Sequence[Candidate], facts: PeerFacts
) -> Sequence[float]:
    return [-float(c.expected_blocks) for c in candidates]


def _predicted_ttft(
    request: RouteRequest, candidates: Sequence[Candidate], facts: PeerFacts
) -> Sequence[float]:
    return [_queue_s(c) + _compute_s(request, c) for c in candidates]


def _queue_3_uncached(
    request: RouteRequest, candidates: Sequence[Candidate], facts: PeerFacts
) -> Sequence[float]:
    return [_queue_s(c) + 3 * _compute_s(request, c) for c in candidates]


def _dynamo(request: RouteRequest, candidates: Sequence[Candidate], facts: PeerFacts) -> Sequence[float]:
    """In blocks: prefill there and coming, less the overlap; and blocks in use once this request is there."""
    size, scores = request.block_size, []
    for c in candidates:
        prefill = (c.queue_tokens + request.prompt_tokens) / size - c.expected_blocks
        active = facts.active.get(c.worker_id, Counter())
        new = sum(key not in active for key in facts.arriving)
        scores.append(max(0.0, prefill) + len(active) + new)
    return scores


def _sglang(request: RouteRequest, candidates: Sequence[Candidate], facts: PeerFacts) -> Sequence[float]:
    loads = [c.requests for c in candidates]
    least, most = min(loads), max(loads)
    longest = max(c.expected_blocks for c in candidates)
    uneven = most - least > SGLANG_UNEVEN_BY and most > SGLANG_UNEVEN_TIMES * least
    if uneven or longest * request.block_size <= SGLANG_MATCH_SHARE * request.prompt_tokens:
        return [float(load) for load in loads]
    return [-float(c.expected_blocks) for c in candidates]


def _llm_d(request: RouteRequest, candidates: Sequence[Candidate], facts: PeerFacts) -> Sequence[float]:
    blocks = max(1, request.prompt_tokens // request.block_size)
    queues = [facts.waiting.get(c.worker_id, 0) for c in candidates]
    shortest, longest = min(queues), max(queues)
    turns = _turns(candidates, facts)
    scores = []
    for c, queue, turn in zip(candidates, queues, turns, strict=True):
        short = (longest - queue) / (longest - shortest) if longest > shortest else 1.0
        unused = 1.0 - facts.used_share.get(c.worker_id, 0.0)
        matched = c.expected_blocks / blocks
        scores.append(
            -(
                LLMD_PREFIX_WEIGHT * matched
                + LLMD_QUEUE_WEIGHT * short
                + LLMD_CACHE_WEIGHT * unused
                + LLMD_NO_HIT_WEIGHT * turn
            )
        )
    return scores


def _turns(candidates: Sequence[Candidate], facts: PeerFacts) -> Sequence[float]:
    """Of a cold prompt: 1 for who got none yet, or none for longest, down to 0. Else all are equal."""
    if len(candidates) == 1 or any(c.expected_blocks for c in candidates):
        return [0.5] * len(candidates)
    order = [c.worker_id for c in candidates if c.worker_id not in facts.cold_order] + list(facts.cold_order)
    present = {c.worker_id for c in candidates}
    rank = {worker_id: n for n, worker_id in enumerate(w for w in order if w in present)}
    return [1.0 - rank[c.worker_id] / (len(candidates) - 1) for c in candidates]


_SCORES: dict[str, Score] = {
    "longest_prefix": _longest_prefix,
    "predicted_ttft": _predicted_ttft,
    "queue_3_uncached": _queue_3_uncached,
    "dynamo": _dynamo,
    "sglang": _sglang,
    "llm_d": _llm_d,
}
