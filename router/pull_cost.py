"""Whether pulling a prompt's beginning from another worker beats computing it, for all candidates at once.

    with a pull(w) = latency(w) + missing blocks * block bytes / rate(w) + computing the rest

Latency and rate are what w has measured of its own pulls. The source is the worker that holds the longest
confirmed part, and of equals the one with the fewest requests. What is only predicted cannot be pulled yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvhive.router.candidate_table import CandidateTable, Column, greatest

UNMEASURED_LATENCY_S = 0.02
UNMEASURED_BYTES_PER_S = 1e9
"""What a worker that has not pulled yet, or not for long, is taken for: the hope that makes it try once."""


@dataclass(frozen=True, slots=True)
class PullTable:
    """What each candidate would do, as columns."""

    source: int
    """Row of the worker that holds the most; -1 where nobody has anything to give."""
    blocks: Column
    """Leading blocks that a candidate has after its pull; 0 where computing is faster."""
    pull_s: Column
    """Seconds that the pull takes; 0 where there is none."""
    compute_s: Column
    """Seconds until the prompt is computed, by the faster way."""


def with_pulls(
    table: CandidateTable,
    held_blocks: Column,
    least_blocks: float,
    alone_s: Column,
    compute_s: Callable[[Column], Column],
) -> PullTable:
    """Choose between pulling and computing for every candidate.

    held_blocks: the leading blocks that each has by itself
    least_blocks: what counts as nothing; a source has more than that
    alone_s: seconds to compute the prompt after what each has by itself
    compute_s: seconds to compute the prompt after so many leading blocks
    """
    none = np.zeros(len(table))
    source = _source(table, least_blocks)
    if source < 0:
        return PullTable(-1, none, none, alone_s)
    blocks = np.full(len(table), table.matched_blocks[source])
    missing = blocks - held_blocks
    able = (missing > 0) & (table.block_bytes == table.block_bytes[source])
    if not able.any():
        return PullTable(-1, none, none, alone_s)
    measured = table.pull_bytes_per_s > 0
    latency_s = np.where(measured, table.pull_latency_s, UNMEASURED_LATENCY_S)
    bytes_per_s = np.where(measured, table.pull_bytes_per_s, UNMEASURED_BYTES_PER_S)
    pull_s = latency_s + missing * table.block_bytes / bytes_per_s
    together = pull_s + compute_s(np.maximum(blocks, held_blocks))
    pulls = able & (together < alone_s)
    return PullTable(source, blocks * pulls, pull_s * pulls, np.where(pulls, together, alone_s))


def crossover_blocks(
    block_bytes: int, latency_s: float, bytes_per_s: float, step_s: Callable[[int], float], most: int
) -> int:
    """Return from how many blocks on a pull beats computing them; 0 when up to `most` it does not.

    step_s: seconds to compute so many blocks
    """
    if not block_bytes or bytes_per_s <= 0:
        return 0
    low, high = 1, most
    if latency_s + most * block_bytes / bytes_per_s >= step_s(most):
        return 0
    while low < high:  # latency is paid once, and what is computed grows at least as fast as what is pulled
        middle = (low + high) // 2
        if latency_s + middle * block_bytes / bytes_per_s < step_s(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _source(table: CandidateTable, least_blocks: float) -> int:
    """The row of whoever can give the most, and more than that; -1: nobody can."""
    if not len(table) or greatest(table.matched_blocks) <= least_blocks:
        return -1  # as for every new prompt
    give = table.matched_blocks * (table.block_bytes > 0)
    best = greatest(give)
    if best <= least_blocks:
        return -1
    most = np.flatnonzero(give == best)
    return int(most[table.requests[most].argmin()])
