"""What a request costs at each worker, in seconds: one formula for all candidates at once.

    cost(w)  = queue_s + room_s + price * compute_s + decode_s
    price(w) = 1 / (1 - load) / (1 - reuse)        reuse only where computing evicts

`queue_s` is the prefill work ahead of the request, `compute_s` that of its own uncached tokens, both by
the step-time model the worker measured of itself; or a pull and the rest, where that takes less
(pull_cost.py). The price is above 1 because computing spends capacity that others wait for: `load` is the
share of the fleet's time that goes into prompts. What it evicts may have to be computed again, which evicts
again: `reuse` is how likely that is, as the workers count it. Both are taken of the fleet as a whole, since
what one worker counts is mostly chance. Tokens that another worker is just computing for somebody else count
twice, else a burst of equal prompts would be computed everywhere. `decode_s` is what the running sequences
add to the steps that compute it. `room_s` is the wait for some of them to end, where the pool, full of what
they use and will use, has no room for the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import overload

import numpy as np

from kvhive.router.candidate_table import CandidateTable, Column, greatest
from kvhive.router.pull_cost import PullTable, with_pulls
from kvhive.router.routing_policy import Candidate, CandidateCost, RouteRequest

HIGHEST_PRICE = 6.0
"""Of the factors of the price, each. Where a share `load` of the time is spent computing, a second more of it
costs everybody 1 / (1 - load) seconds in all; near 1 that is more than an estimate can bear."""

GROWTH_SHARE = 0.5
"""How much of what running sequences are expected to generate yet counts as taken: some end meanwhile."""

FULL_POOL_STEPS = 4.0
"""What a pool full of running sequences costs beside an empty one, in steps without tokens, where both have
room: the fuller one is nearer to making somebody wait. Chosen on traces, not derived."""


@dataclass(slots=True)  # not frozen, as CandidateTable
class CostTable(Sequence[CandidateCost]):
    """The terms as columns, in seconds; its rows become objects when they are looked at."""

    worker_ids: Sequence[str]
    matched_blocks: Column
    expected_blocks: Column
    queue_s: Column
    compute_s: Column
    price: Column
    decode_s: Column
    room_s: Column
    cost_s: Column
    pulls: PullTable

    def __len__(self) -> int:
        return len(self.worker_ids)

    @overload
    def __getitem__(self, row: int) -> CandidateCost: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[CandidateCost]: ...
    def __getitem__(self, row: int | slice) -> CandidateCost | Sequence[CandidateCost]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        return CandidateCost(
            worker_id=self.worker_ids[row],
            matched_blocks=int(self.matched_blocks[row]),
            expected_blocks=int(self.expected_blocks[row]),
            queue_s=float(self.queue_s[row]),
            compute_s=float(self.compute_s[row]),
            price=float(self.price[row]),
            decode_s=float(self.decode_s[row]),
            room_s=float(self.room_s[row]),
            pull_s=float(self.pulls.pull_s[row]),
            pulled_blocks=int(self.pulls.blocks[row]),
        )

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self))}]"


def compare(request: RouteRequest, candidates: Sequence[Candidate], least_blocks: float = 0.0) -> CostTable:
    """Return every candidate's cost, in the order given. A match of up to `least_blocks` counts as none."""
    table = CandidateTable.of(candidates)
    counted = table.expected_blocks * (table.expected_blocks > least_blocks)
    cached = np.minimum(counted * request.block_size, request.prompt_tokens - 1)
    uncached = request.prompt_tokens - cached
    # What is queued and what is new share the last step: its base is paid once.
    queue_steps = np.ceil(table.queue_tokens / table.max_step_tokens)
    steps = np.ceil((table.queue_tokens + uncached) / table.max_step_tokens)
    queue_s = queue_steps * table.step_base_s + _tokens_s(table, table.queue_tokens, 0.0)
    alone_s = (steps - queue_steps) * table.step_base_s + _tokens_s(table, uncached, cached)
    pulls = with_pulls(
        table, counted, least_blocks, alone_s, partial(_compute_s, request, table, queue_steps)
    )
    price = _price(request, table, cached, uncached)
    decode_s = steps * table.decoding * table.per_token_s
    room_s = _room_s(request, table, cached)
    cost_s = queue_s + room_s + price * pulls.compute_s + decode_s
    return CostTable(
        table.worker_ids,
        table.matched_blocks,
        table.expected_blocks,
        queue_s,
        pulls.compute_s,
        price,
        decode_s,
        room_s,
        cost_s,
        pulls,
    )


def _compute_s(
    request: RouteRequest, table: CandidateTable, queue_steps: Column, held_blocks: Column
) -> Column:
    """Seconds to compute the prompt after so many leading blocks, beyond what is queued before it."""
    cached = np.minimum(held_blocks * request.block_size, request.prompt_tokens - 1)
    uncached = request.prompt_tokens - cached
    steps: Column = np.ceil((table.queue_tokens + uncached) / table.max_step_tokens)
    return (steps - queue_steps) * table.step_base_s + _tokens_s(table, uncached, cached)


def _tokens_s(table: CandidateTable, tokens: Column, context: Column | float) -> Column:
    """Seconds for prompt tokens after `context` others, without what each step costs by itself."""
    return tokens * (table.per_token_s + (context + tokens / 2) * table.per_attention_s)


def _price(request: RouteRequest, table: CandidateTable, cached: Column, uncached: Column) -> Column:
    """What a second of computing counts, for each worker."""
    busy = table.cold_tokens_per_s * (table.per_token_s + table.step_base_s / table.max_step_tokens)
    price = np.full(len(table), _price_of(busy))
    evicts = table.free_tokens < uncached + request.max_tokens
    if np.count_nonzero(evicts):
        price[evicts] *= _price_of(table.victim_reuse)
    if greatest(table.expected_blocks):
        coming = greatest(table.expected_blocks * (table.expected_blocks > table.matched_blocks))
        twice = np.maximum(coming * request.block_size - cached, 0.0)
        price *= 1.0 + np.minimum(twice, uncached) / uncached
    return price


def _price_of(shares: Column) -> float:
    """Return 1 / (1 - share), of the mean share."""
    share = min(float(np.add.reduce(shares)) / len(shares), 1.0 - 1.0 / HIGHEST_PRICE)
    return 1.0 / (1.0 - share)


def _room_s(request: RouteRequest, table: CandidateTable, cached: Column) -> Column:
    """Seconds until enough running sequences have ended, and a little for every share of the pool in use.

    What is cached may be what they use; as far as nobody knows that it is, it takes room of its own.
    """
    nearly_s: Column = table.live_tokens * table.step_base_s * FULL_POOL_STEPS / table.capacity_tokens
    coming = request.prompt_tokens - np.minimum(table.shared_tokens, cached)
    growing = GROWTH_SHARE * (table.growth_tokens + np.minimum(table.answer_tokens, request.max_tokens))
    missing = np.maximum(table.live_tokens + coming + growing - table.capacity_tokens, 0.0)
    if not np.count_nonzero(missing):  # as most of the time
        return nearly_s
    running = np.maximum(table.decoding, 1.0)
    ends = np.ceil(missing * running / np.maximum(table.live_tokens, 1.0))
    step_s = table.step_base_s + table.decoding * table.per_token_s
    wait_s: Column = table.release_tokens * step_s * np.minimum(ends, running) / running
    return wait_s + nearly_s
