"""How few workers would have done, for somebody who knew who would come.

The clairvoyant has as many workers as it likes from one window to the next, without a start-up, and pays
for no drain. Window by window it takes the fewest with which no more requests of the window miss the TTFT
goal than may, fractions of a request saved for the next one; what is left over from the windows before is
there, too. It is the same simulator, with the same router, scheduler and caches, and workers that are new
to it begin with empty ones.

Each try is played in a forked process, until it is known of every request of the window whether it is late,
and given up as soon as too many are. The search begins at the count of the window before. Where no count
does, it takes the smallest that does as well as many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from kvhive.proto.errors import KvhiveError
from kvhive.scripts.sim_run import Served
from kvhive.scripts.sim_scaling import ElasticFleet, in_goal

LOOKS = 20
"""How often a try is looked at, to give it up."""


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


def find_clairvoyant(
    simulation: ElasticFleet,
    goal_share: float,
    window_s: float,
    first_guess: int,
    most: int,
    tell: Callable[[int], None] = lambda done: None,
) -> Clairvoyant:
    """Play a simulation that has not begun. `most`: no more workers than these are tried."""
    simulation.begin()
    counts: list[int] = []
    count, left, more = first_guess, 0.0, True
    while more:
        start_s = len(counts) * window_s
        first = len(simulation.served)
        search = _Search(simulation, first, start_s + window_s, goal_share, left)
        count = search.fewest(count, most)
        counts.append(count)
        simulation.resize(count, 0.0)
        more = simulation.advance(start_s + window_s, tell)
        left = search.left(count)
    done = [served for served in simulation.served if not served.refused]
    good = sum(in_goal(served, simulation.goal_s) for served in done)
    return Clairvoyant(window_s, tuple(counts), good / max(1, len(done)))


class _Search:
    """One window's."""

    def __init__(
        self, simulation: ElasticFleet, first: int, end_s: float, goal_share: float, left: float
    ) -> None:
        self._simulation = simulation
        self._first = first
        self._end_s = end_s
        self._late_share = 1.0 - goal_share
        self._left = left
        self._tried: dict[int, float] = {}

    def fewest(self, guess: int, most: int) -> int:
        """The fewest workers that do, from a guess on; where none do, the fewest that do as well as many."""
        count = min(guess, most)
        if self._spare(count) >= 0:
            while count > 1 and self._spare(count - 1) >= 0:
                count -= 1
            return count
        low, high = count, min(most, 2 * count)
        while self._spare(high) < 0 and high < most and self._spare(high) > self._spare(low):
            low, high = high, min(most, 2 * high)
        wanted = min(0.0, self._spare(high))
        while low < high - 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._spare(middle) >= wanted else (middle, high)
        return high

    def left(self, count: int) -> float:
        """Requests that may still be late in the next window: less than one."""
        return min(max(0.0, self._spare(count)), 0.999)

    def _spare(self, count: int) -> float:
        """How many more might have been late with so many workers; negative: too many were."""
        if count not in self._tried:
            self._tried[count] = self._try(count)
        return self._tried[count]

    def _try(self, count: int) -> float:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, repr(self._play(count)).encode())
            finally:
                os._exit(0)  # nothing of the parent's may be written or closed here
        os.close(writer)
        with os.fdopen(reader) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        if not text:
            raise KvhiveError(f"trying {count} workers: the process that tried it ended without an answer")
        return float(text)

    def _play(self, count: int) -> float:
        simulation, goal_s = self._simulation, self._simulation.goal_s
        simulation.resize(count, 0.0)
        simulation.advance(self._end_s)
        window = simulation.served[self._first :]
        spare = self._left + self._late_share * len(window)
        while True:
            late = sum(_is_late(served, simulation.now, goal_s) for served in window)
            decided = all(served.first_token_at >= 0 or served.refused for served in window)
            if late > spare or decided or simulation.now > self._end_s + goal_s:
                return spare - late
            simulation.advance(simulation.now + goal_s / LOOKS)


def _is_late(served: Served, now: float, goal_s: float) -> bool:
    if served.refused:
        return False
    return (served.first_token_at if served.first_token_at >= 0 else now) - served.arrived_at > goal_s
