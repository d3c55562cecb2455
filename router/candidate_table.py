"""Candidates as columns: what a policy computes of hundreds of workers at once.

A table is a Sequence[Candidate] like any other, whose rows become objects when they are looked at; what it
refers to is valid during one decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from kvhive.router.rendezvous import Seeds, worker_seeds
from kvhive.router.routing_policy import Candidate, Speed

Column = npt.NDArray[np.float64]


def least(column: Column) -> float:
    """Return the least of a column that is not empty: as min() does, in half the time."""
    return float(column[column.argmin()])


def greatest(column: Column) -> float:
    """Return the greatest of a column that is not empty: as max() does, in half the time."""
    return float(column[column.argmax()])


@dataclass(slots=True)  # frozen it would cost a decision among few workers 3 % more
class CandidateTable(Sequence[Candidate]):
    """One entry per worker in every column, all as float64. The names are those of Candidate and Speed."""

    worker_ids: Sequence[str]
    seeds: Seeds
    """See rendezvous.worker_seeds."""
    matched_blocks: Column
    expected_blocks: Column
    shared_tokens: Column
    queue_tokens: Column
    decoding: Column
    requests: Column
    live_tokens: Column
    recent_cold_tokens: Column
    cold_tokens_per_s: Column
    step_base_s: Column
    per_token_s: Column
    per_attention_s: Column
    max_step_tokens: Column
    victim_reuse: Column
    free_tokens: Column
    capacity_tokens: Column
    growth_tokens: Column
    release_tokens: Column
    answer_tokens: Column
    block_bytes: Column
    pull_latency_s: Column
    pull_bytes_per_s: Column
    most_running: Column

    @staticmethod
    def of(candidates: Sequence[Candidate]) -> CandidateTable:
        """Return the candidates as a table, which they may be already."""
        if isinstance(candidates, CandidateTable):
            return candidates
        rows = [
            (
                c.matched_blocks,
                c.expected_blocks,
                c.shared_tokens,
                c.queue_tokens,
                c.decoding,
                c.requests,
                c.live_tokens,
                c.recent_cold_tokens,
                c.cold_tokens_per_s,
                c.speed.step_base_s,
                c.speed.per_token_s,
                c.speed.per_attention_s,
                c.speed.max_step_tokens,
                c.victim_reuse,
                c.free_tokens,
                c.capacity_tokens,
                c.growth_tokens,
                c.release_tokens,
                c.answer_tokens,
                c.block_bytes,
                c.pull_latency_s,
                c.pull_bytes_per_s,
                c.most_running,
            )
            for c in candidates
        ]
        worker_ids = [candidate.worker_id for candidate in candidates]
        columns = np.array(rows, np.float64).reshape(len(rows), 23).T
        return CandidateTable(worker_ids, worker_seeds(worker_ids), *columns)

    def where(self, kept: Sequence[bool] | npt.NDArray[np.bool_]) -> CandidateTable:
        """Return a table of the rows that are kept: this one, where all are."""
        if np.count_nonzero(kept) == len(self):
            return self
        rows = np.flatnonzero(kept)
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
            victim_reuse=float(self.victim_reuse[row]),
            free_tokens=int(self.free_tokens[row]),
            capacity_tokens=int(self.capacity_tokens[row]),
            recent_cold_tokens=float(self.recent_cold_tokens[row]),
            requests=int(self.requests[row]),
            live_tokens=int(self.live_tokens[row]),
            shared_tokens=int(self.shared_tokens[row]),
            growth_tokens=float(self.growth_tokens[row]),
            release_tokens=float(self.release_tokens[row]),
            answer_tokens=float(self.answer_tokens[row]),
            cold_tokens_per_s=float(self.cold_tokens_per_s[row]),
            block_bytes=int(self.block_bytes[row]),
            pull_latency_s=float(self.pull_latency_s[row]),
            pull_bytes_per_s=float(self.pull_bytes_per_s[row]),
            most_running=int(self.most_running[row]),
        )

    def _columns(self) -> tuple[Column, ...]:
        return (
            self.matched_blocks,
            self.expected_blocks,
            self.shared_tokens,
            self.queue_tokens,
            self.decoding,
            self.requests,
            self.live_tokens,
            self.recent_cold_tokens,
            self.cold_tokens_per_s,
            self.step_base_s,
            self.per_token_s,
            self.per_attention_s,
            self.max_step_tokens,
            self.victim_reuse,
            self.free_tokens,
            self.capacity_tokens,
            self.growth_tokens,
            self.release_tokens,
            self.answer_tokens,
            self.block_bytes,
            self.pull_latency_s,
            self.pull_bytes_per_s,
            self.most_running,
        )
