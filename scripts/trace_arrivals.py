"""When the requests of a trace arrive: as recorded, faster, or at a share of what the fleet can compute.

Load is measured without a cache: the seconds of prefill that all prompts would take, over the seconds that
all workers together have. So a load of 0.9 says the same of every trace, however much of it is repeated.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvhive.proto.errors import ConfigError
from kvhive.scripts.trace_format import Trace

CLOSED_NATIVE_LOAD = 0.3
"""A closed trace tells starts in gaps between sessions, not in seconds: this load is its native rate."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast to play a trace: at `load` where it is not 0, else `rate` times the native rate."""

    rate: float = 1.0
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The requests' dependencies, played at one pace. Requests are named by their place in the trace."""

    starts: tuple[tuple[float, int], ...]
    """(seconds, request), in order: all of an open trace, the first turns of a closed one."""
    after: dict[int, int]
    """A session's next request, which comes `think_s` after the answer to this one."""
    load: float
    """The offered load without a cache."""


def plan_arrivals(
    trace: Trace, pace: Pace, workers: int, prefill_s: Callable[[int], float], seed: int = 0
) -> Schedule:
    """Lay out the arrivals. prefill_s: seconds to compute a prompt of so many tokens, on one worker.

    Raises ConfigError.
    """
    first, after = _sessions(trace) if trace.closed else (range(len(trace.requests)), {})
    times = [trace.requests[number].arrival for number in first]
    if not trace.closed:
        times = _spread_ticks(times, random.Random(seed))
    span = max(times) - min(times)
    demand = sum(prefill_s(request.prompt_tokens) for request in trace.requests) / workers
    if pace.load:
        scale = demand / (pace.load * span) if span else 0.0
    elif trace.closed:
        scale = demand / (pace.rate * CLOSED_NATIVE_LOAD * span) if span else 0.0
    else:
        scale = 1.0 / pace.rate
    begin = min(times)
    starts = sorted(((at - begin) * scale, number) for at, number in zip(times, first, strict=True))
    seconds = span * scale
    return Schedule(tuple(starts), after, demand / seconds if seconds else 0.0)


def _sessions(trace: Trace) -> tuple[Sequence[int], dict[int, int]]:
    """Return the first requests of all sessions, and what follows each other one."""
    turns: dict[int, list[tuple[int, int]]] = {}
    for number, request in enumerate(trace.requests):
        session = request.session if request.session >= 0 else -1 - number  # unknown: on its own
        turns.setdefault(session, []).append((request.turn, number))
    after = {}
    for session, numbers in turns.items():
        numbers.sort()
        if len({turn for turn, _ in numbers}) < len(numbers):
            raise ConfigError(f"{trace.name}: session {session} has the same turn twice")
        after.update({here: there for (_, here), (_, there) in itertools.pairwise(numbers)})
    return [numbers[0][1] for numbers in turns.values()], after


def _spread_ticks(times: Sequence[float], noise: random.Random) -> list[float]:
    """Spread what was recorded at one tick of a coarse clock evenly at random until the next tick."""
    ticks = sorted(set(times))
    # A clock is coarse when most requests share their time with others.
    if len(times) < 2 * len(ticks) or len(ticks) == 1:
        return list(times)
    gap = min(later - earlier for earlier, later in itertools.pairwise(ticks))
    return [at + noise.random() * gap for at in times]
