"""Candidates as columns: what a policy computes of hundreds of workers at once.

A table is a Sequence[Candidate] like any other, whose rows become objects when they are looked at; what it
refers to is valid during one decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from kvhive.router.rendezvous import Seeds, worker_seeds
from kvhive.router.routing_policy import Candidate, Speed

Column = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CandidateTable(Sequence[Candidate]):
    """One entry per worker in every column, all as float64. The names are those of Candidate and Speed."""

    worker_ids: Sequence[str]
    seeds: Seeds
    """See rendezvous.worker_seeds."""
    matched_blocks: Column
    expected_blocks: Column
    queue_tokens: Column
    decoding: Column
    requests: Column
    recent_cold_tokens: Column
    step_base_s: Column
    per_token_s: Column
    per_attention_s: Column
    max_step_tokens: Column
    victim_age_s: Column
    """Infinite while nothing is cached."""
    free_tokens: Column
    capacity_tokens: Column
    live_tokens: Column
    block_bytes: Column
    pull_latency_s: Column
    pull_bytes_per_s: Column

    @staticmethod
    def of(candidates: Sequence[Candidate]) -> CandidateTable:
        """Return the candidates as a table, which they may be already."""
        if isinstance(candidates, CandidateTable):
            return candidates
        rows = [
            (
                c.matched_blocks,
                c.expected_blocks,
                c.queue_tokens,
                c.decoding,
                c.requests,
                c.recent_cold_tokens,
                c.speed.step_base_s,
                c.speed.per_token_s,
                c.speed.per_attention_s,
                c.speed.max_step_tokens,
                math.inf if c.victim_age_s is None else c.victim_age_s,
                c.free_tokens,
                c.capacity_tokens,
                c.live_tokens,
                c.block_bytes,
                c.pull_latency_s,
                c.pull_bytes_per_s,
            )
            for c in candidates
        ]
        worker_ids = [candidate.worker_id for candidate in candidates]
        columns = np.array(rows, np.float64).reshape(len(rows), 17).T
        return CandidateTable(worker_ids, worker_seeds(worker_ids), *columns)

    def where(self, kept: Sequence[bool] | npt.NDArray[np.bool_]) -> CandidateTable:
        """Return a table of the rows that are kept: this one, where all are."""
        rows = np.flatnonzero(kept)
        if len(rows) == len(self):
            return self
        columns = (column[rows] for column in self._columns())
        return CandidateTable([self.worker_ids[row] for row in rows.tolist()], self.seeds[rows], *columns)

    def __len__(self) -> int:
        return len(self.worker_ids)

    @overload
    def __getitem__(self, row: int) -> Candidate: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, row: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        age = float(self.victim_age_s[row])
        return Candidate(
            worker_id=self.worker_ids[row],
            matched_blocks=int(self.matched_blocks[row]),
            expected_blocks=int(self.expected_blocks[row]),
            queue_tokens=int(self.queue_tokens[row]),
            decoding=int(self.decoding[row]),
            speed=Speed(
                float(self.step_base_s[row]),
                float(self.per_token_s[row]),
                float(self.per_attention_s[row]),
                int(self.max_step_tokens[row]),
            ),
            victim_age_s=age if math.isfinite(age) else None,
            free_tokens=int(self.free_tokens[row]),
            capacity_tokens=int(self.capacity_tokens[row]),
            recent_cold_tokens=float(self.recent_cold_tokens[row]),
            requests=int(self.requests[row]),
            live_tokens=int(self.live_tokens[row]),
            block_bytes=int(self.block_bytes[row]),
            pull_latency_s=float(self.pull_latency_s[row]),
            pull_bytes_per_s=float(self.pull_bytes_per_s[row]),
        )

    def _columns(self) -> tuple[Column, ...]:
        return (
            self.matched_blocks,
            self.expected_blocks,
            self.queue_tokens,
            self.decoding,
            self.requests,
            self.recent_cold_tokens,
            self.step_base_s,
            self.per_token_s,
            self.per_attention_s,
            self.max_step_tokens,
            self.victim_age_s,
            self.free_tokens,
            self.capacity_tokens,
            self.live_tokens,
            self.block_bytes,
            self.pull_latency_s,
            self.pull_bytes_per_s,
        )
