"""What a request costs at each worker, in seconds: one formula for all candidates at once.

    cost(w)  = queue_s + room_s + price * compute_s + decode_s
    price(w) = 2 + 2 / (1 + victim age / 120 s)

`queue_s` is the prefill work ahead of the request, `compute_s` that of its own uncached tokens, both by
the step-time model the worker measured of itself. The price is above 1 because computing spends capacity
that others wait for, and higher where the request would evict what was used a moment ago. `decode_s` is what
the running sequences add to the steps that compute it. `room_s` is the wait for some of them to end, where
the pool, full of what they use, has no room for the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from kvhive.router.candidate_table import CandidateTable, Column
from kvhive.router.routing_policy import Candidate, CandidateCost, RouteRequest

BASE_PRICE = 2.0
"""What a second of computing is taken to cost, in seconds of everybody's; measured on traces, not derived."""

EVICTION_PRICE = 2.0
"""The same, on top, for computing that evicts what was used just now."""

EVICTION_AGE_S = 120.0
"""Evicting what was last used that long ago costs half of EVICTION_PRICE."""

SEQUENCE_LIFE_S = 10.0
"""How long a running sequence is taken to hold its blocks: of n of them, one ends every 10/n seconds."""


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
    compute_s = (steps - queue_steps) * table.step_base_s + _tokens_s(table, uncached, cached)
    evicts = table.free_tokens < uncached + request.max_tokens
    price = BASE_PRICE + evicts * EVICTION_PRICE / (1.0 + table.victim_age_s / EVICTION_AGE_S)
    decode_s = steps * table.decoding * table.per_token_s
    room_s = _room_s(table, cached, uncached)
    cost_s = queue_s + room_s + price * compute_s + decode_s
    return CostTable(
        table.worker_ids,
        table.matched_blocks,
        table.expected_blocks,
        queue_s,
        compute_s,
        price,
        decode_s,
        room_s,
        cost_s,
    )


def _tokens_s(table: CandidateTable, tokens: Column, context: Column | float) -> Column:
    """Seconds for prompt tokens after `context` others, without what each step costs by itself."""
    return tokens * (table.per_token_s + (context + tokens / 2) * table.per_attention_s)


def _room_s(table: CandidateTable, cached: Column, uncached: Column) -> Column:
    """Seconds until enough running sequences have ended; what is cached may be what they use."""
    in_use = np.maximum(table.live_tokens, cached)
    missing = np.maximum(0.0, in_use + table.queue_tokens + uncached - table.capacity_tokens)
    if not np.count_nonzero(missing):  # as most of the time
        return missing
    running = np.maximum(1.0, table.decoding)
    ends = np.ceil(missing * running / np.maximum(1.0, table.live_tokens))
    return SEQUENCE_LIFE_S * np.minimum(ends, running) / running
