"""How few workers would have done, for somebody who knew who would come.

Window by window the clairvoyant takes the fewest workers with which no more requests of the window miss the
TTFT goal than may, fractions of a request saved for the next one. What the windows before have left over is
there, too; workers come at once and go without a drain. All have one queue, first come, first served, so no
router is better. A request takes the seconds of the cost model for what is not cached of it: as the
simulation had it (`jobs_served`), or with everything cached that ever was in an earlier prompt (`jobs_of`),
which nobody can reach.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvhive.scripts.sim_costs import CostModel
from kvhive.scripts.sim_run import Served
from kvhive.scripts.trace_arrivals import Schedule
from kvhive.scripts.trace_format import Trace


@dataclass(frozen=True, slots=True)
class Clairvoyant:
    """The fewest workers of each window."""

    window_s: float
    counts: tuple[int, ...]
    in_goal_share: float

    @property
    def worker_hours(self) -> float:
        """All windows' together."""
        return sum(self.counts) * self.window_s / 3600


@dataclass(frozen=True, slots=True)
class Job:
    """A request, as the clairvoyant sees it."""

    arrived_at: float
    work_s: float


def jobs_of(trace: Trace, schedule: Schedule, cost: CostModel) -> list[Job]:
    """Return the requests of an open trace in the order of their arrival, with what no cache can save."""
    seen: set[int] = set()
    jobs = []
    for arrived_at, number in schedule.starts:
        request = trace.requests[number]
        chain = [block for start, count in request.spans() for block in range(start, start + count)]
        matched = sum(1 for _ in itertools.takewhile(seen.__contains__, chain))
        seen.update(chain[matched:])
        cached = min(matched * trace.block_size, request.prompt_tokens - 1)
        jobs.append(Job(arrived_at, cost.prefill_s(request.prompt_tokens - cached, cached)))
    return jobs


def jobs_served(served: Sequence[Served], cost: CostModel) -> list[Job]:
    """Return requests that a simulation has answered, with what it had to compute for them."""
    return [
        Job(each.arrived_at, cost.prefill_s(each.prompt_tokens - each.cached_tokens, each.cached_tokens))
        for each in sorted(served, key=lambda each: each.arrived_at)
        if not each.refused
    ]


def find_clairvoyant(
    jobs: Sequence[Job], goal_s: float, goal_share: float, window_s: float, most: int
) -> Clairvoyant:
    """Find the fewest workers of each window, of at most `most`."""
    counts: list[int] = []
    free_at: list[float] = []
    count, left, late_in_all = 1, 0.0, 0
    for start_s, jobs_now in _windows(jobs, window_s):
        window = _Window(free_at, start_s, jobs_now, goal_s)
        # Where nothing helps (a prompt that takes longer than the goal), the fewest that do as well as most.
        allowed = max((1 - goal_share) * len(jobs_now) + left, float(window.late(most)))
        while count < most and window.late(count) > allowed:
            count += 1
        while count > 1 and window.late(count - 1) <= allowed:
            count -= 1
        late_in_all += window.late(count)
        left = min(0.999, max(0.0, allowed - window.late(count)))
        free_at = window.free_at(count)
        counts.append(count)
    return Clairvoyant(window_s, tuple(counts), 1 - late_in_all / max(1, len(jobs)))


def _windows(jobs: Sequence[Job], window_s: float) -> Iterator[tuple[float, list[Job]]]:
    """Yield (start, the requests that come in it) of each window from 0 on, empty ones too."""
    number = 0
    for key, group in itertools.groupby(jobs, lambda job: int(job.arrived_at // window_s)):
        for empty in range(number, key):
            yield empty * window_s, []
        yield key * window_s, list(group)
        number = key + 1


class _Window:
    """One window, played with any number of workers, of whom so many are busy until then."""

    def __init__(
        self, busy_until: Sequence[float], start_s: float, jobs: Sequence[Job], goal_s: float
    ) -> None:
        self._busy_until = sorted(busy_until)
        self._start_s = start_s
        self._jobs = jobs
        self._goal_s = goal_s
        self._played: dict[int, tuple[int, list[float]]] = {}

    def late(self, count: int) -> int:
        """How many are late with so many workers."""
        return self._play(count)[0]

    def free_at(self, count: int) -> list[float]:
        """When each of so many workers has done what came in the window."""
        return self._play(count)[1]

    def _play(self, count: int) -> tuple[int, list[float]]:
        if count not in self._played:
            kept = self._busy_until[max(0, len(self._busy_until) - count) :]  # the idlest go first
            queue = kept + [self._start_s] * (count - len(kept))
            heapq.heapify(queue)
            late = 0
            for job in self._jobs:
                done_at = max(queue[0], job.arrived_at) + job.work_s
                heapq.heapreplace(queue, done_at)
                late += done_at - job.arrived_at > self._goal_s
            self._played[count] = late, queue
        return self._played[count]
