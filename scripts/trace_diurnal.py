"""A day of traffic that nobody recorded: few requests at night, many by day, and never the same minute twice.
minute.

    diurnal                        a day between 9 and 180 workers' worth of work
    diurnal:hours=1,low=2,high=6   the same curve within an hour, smaller

Sessions begin by a Poisson process. Its rate follows a curve whose logarithm is a cosine, with the lowest
point at a twelfth of the day (two in the night), times a slow noise (log-normal, 5 %, half an hour of
memory). A session is one to six turns; each turn's prompt is one of eight system prompts, all that was said
before, and something new. Work is what must be computed when every earlier turn is still cached. Thought
between turns takes a minute or more, and does not wait for the answer: who comes when does not depend on
the fleet.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from kvhive.proto.errors import ConfigError
from kvhive.scripts.trace_format import Trace, TraceRequest

PREFIX = "diurnal"

BLOCK = 1024
"""Tokens. Large blocks and long prompts make a day of hundreds of workers few enough steps to simulate."""

SYSTEM_PROMPTS, SYSTEM_BLOCKS = 8, 2
MOST_TURNS, MORE_TURNS = 6, 0.5
"""Most turns of a session, and how likely each is followed by another."""

LEAST_THINK_S, THINK_S = 45.0, 60.0
"""Seconds between two turns: at least, and a mean on top."""

NOISE, NOISE_MEMORY_S, NOISE_STEP_S = 0.05, 1800.0, 60.0
LOWEST_AT = 1 / 12
"""Of the day."""


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A day to be made."""

    hours: float = 24.0
    low: float = 9.0
    """Workers' worth of work when it is quietest."""
    high: float = 180.0
    """... and when it is busiest."""
    blocks: float = 10.0
    """Blocks of 1,024 tokens that a turn adds, in the mean."""
    output: float = 16.0
    """Tokens of an answer."""

    def load(self, at_s: float) -> float:
        """Workers' worth of work at a moment, without noise."""
        phase = 2 * math.pi * (at_s / (self.hours * 3600) - LOWEST_AT)
        share = (1 - math.cos(phase)) / 2
        return self.low * math.pow(self.high / self.low, share)


_LIMITS = {
    "hours": (0.01, 240.0),
    "low": (0.01, 4000.0),
    "high": (0.01, 4000.0),
    "blocks": (1.0, 100.0),
    "output": (1.0, 100_000.0),
}


def is_diurnal(text: str) -> bool:
    """Whether the name of a trace is not a file's but one of these."""
    return text.partition(":")[0] == PREFIX


def parse_diurnal(text: str) -> Diurnal:
    """Read `diurnal[:key=value,...]`. Raises ConfigError naming the key, its limits and the value."""
    values: dict[str, float] = {}
    for part in filter(None, text.partition(":")[2].split(",")):
        key, _, given = part.partition("=")
        if key not in _LIMITS:
            raise ConfigError(f"{PREFIX}: {key}: must be one of {', '.join(_LIMITS)}")
        low, high = _LIMITS[key]
        try:
            values[key] = float(given)
        except ValueError:
            values[key] = math.nan
        if not low <= values[key] <= high:
            raise ConfigError(f"{PREFIX}: {key}: must be a number of {low:g} to {high:g}, is {given!r}")
    day = dataclasses.replace(Diurnal(), **values)
    if day.low > day.high:
        raise ConfigError(f"{PREFIX}: high: must be at least low ({day.low:g}), is {day.high:g}")
    return day


def make_trace(day: Diurnal, prefill_s: Callable[[int, int], float], seed: int, limit: int = 0) -> Trace:
    """Make the day's requests. prefill_s: seconds for (tokens, after so many) on one worker. `limit`: only
    the first requests; 0: all.

    The same arguments give the same trace.
    """
    noise = random.Random(seed)
    requests: list[TraceRequest] = []
    next_id = SYSTEM_PROMPTS * SYSTEM_BLOCKS
    work_s = _session_work_s(day, prefill_s)
    for session, at_s in enumerate(_starts(day, work_s, noise)):
        app, blocks = noise.randrange(SYSTEM_PROMPTS), 0
        first_id, when_s = next_id, at_s
        for turn in range(_turns(noise)):
            if turn:
                when_s += LEAST_THINK_S + noise.expovariate(1 / THINK_S)
            blocks += _new_blocks(day, noise)
            runs = (app * SYSTEM_BLOCKS, SYSTEM_BLOCKS, first_id, blocks)
            tokens = (SYSTEM_BLOCKS + blocks) * BLOCK
            requests.append(TraceRequest(when_s, session, turn, 0.0, tokens, int(day.output), runs))
        next_id += blocks
    requests.sort(key=lambda request: request.arrival)
    if not requests:
        raise ConfigError(f"{PREFIX}: nobody comes in {day.hours:g} hours of so little work")
    return Trace(PREFIX, BLOCK, False, requests[: limit or None])


def _starts(day: Diurnal, work_s: float, noise: random.Random) -> list[float]:
    """When sessions begin: a Poisson process of a rate that changes every NOISE_STEP_S seconds."""
    starts, level, at_s = [], 0.0, 0.0
    keep = math.exp(-NOISE_STEP_S / NOISE_MEMORY_S)
    end_s = day.hours * 3600
    while at_s < end_s:
        level = keep * level + NOISE * math.sqrt(1 - keep * keep) * noise.gauss(0, 1)
        rate = day.load(at_s) * math.exp(level) / work_s
        step_end, when = min(at_s + NOISE_STEP_S, end_s), at_s + noise.expovariate(rate)
        while when < step_end:
            starts.append(when)
            when += noise.expovariate(rate)
        at_s = step_end
    return starts


def _turns(noise: random.Random) -> int:
    turns = 1
    while turns < MOST_TURNS and noise.random() < MORE_TURNS:
        turns += 1
    return turns


def _new_blocks(day: Diurnal, noise: random.Random) -> int:
    """Blocks that a turn adds: gamma, coefficient of variation 0.7, from one to four times the mean."""
    return max(1, min(round(noise.gammavariate(2.0, day.blocks / 2.0)), int(4 * day.blocks)))


def _session_work_s(day: Diurnal, prefill_s: Callable[[int, int], float]) -> float:
    """Mean seconds of prefill of a session, all earlier turns cached: of many drawn for this alone."""
    noise, drawn, total_s = random.Random(0), 2000, 0.0
    for _ in range(drawn):
        context = SYSTEM_BLOCKS
        for _ in range(_turns(noise)):
            new = _new_blocks(day, noise)
            total_s += prefill_s(new * BLOCK, context * BLOCK)
            context += new
    return total_s / drawn
