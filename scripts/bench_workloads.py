"""What `kvhive bench engine` sends: four workloads of token ids, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

MAX_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: continue these token ids greedily by exactly so many tokens."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and how many of them are under way at a time."""

    name: str
    title: str
    concurrency: int
    asks: tuple[Ask, ...]


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The ids that prompts are drawn from: ordinary tokens of any vocabulary, no special ones."""

    first: int = 1_000
    last: int = 30_000

    def draw(self, chooser: random.Random, count: int) -> tuple[int, ...]:
        """Return ids chosen uniformly."""
        return tuple(chooser.choices(range(self.first, self.last + 1), k=count))


def workload(name: str, seed: str, ids: TokenRange) -> Workload:
    """Return one of WORKLOADS, or WARM_UP. Another seed gives other prompts, so nothing of them is cached."""
    return _MAKERS[name](random.Random(f"{seed}/{name}"), ids)


def _shared_prefix(chooser: random.Random, ids: TokenRange) -> Workload:
    prefix = ids.draw(chooser, 1024)
    asks = tuple(Ask(prefix + ids.draw(chooser, 64), 64) for _ in range(64))
    return Workload("a", "1024 shared + 64 in, 64 out, 64 requests, 8 at a time", MAX_CONCURRENCY, asks)


def _decode(chooser: random.Random, ids: TokenRange) -> Workload:
    asks = tuple(Ask(ids.draw(chooser, 64), 128) for _ in range(32))
    return Workload("b", "64 in, 128 out, 32 requests, 8 at a time", MAX_CONCURRENCY, asks)


def _prefill(chooser: random.Random, ids: TokenRange) -> Workload:
    asks = tuple(Ask(ids.draw(chooser, 2048), 4) for _ in range(16))
    return Workload("c", "2048 in, 4 out, 16 requests, 8 at a time", MAX_CONCURRENCY, asks)


def _one_stream(chooser: random.Random, ids: TokenRange) -> Workload:
    asks = tuple(Ask(ids.draw(chooser, 64), 128) for _ in range(4))
    return Workload("d", "64 in, 128 out, 4 requests, one at a time", 1, asks)


def _warm_up(chooser: random.Random, ids: TokenRange) -> Workload:
    asks = tuple(Ask(ids.draw(chooser, 128), 16) for _ in range(8))
    return Workload(WARM_UP, "128 in, 16 out, 8 requests, 8 at a time", MAX_CONCURRENCY, asks)


WARM_UP = "warm-up"
"""Sent to each target before all else and not counted: first calls compile, allocate and connect."""
_MAKERS: dict[str, Callable[[random.Random, TokenRange], Workload]] = {
    "a": _shared_prefix,
    "b": _decode,
    "c": _prefill,
    "d": _one_stream,
    WARM_UP: _warm_up,
}
WORKLOADS = ("a", "b", "c", "d")
