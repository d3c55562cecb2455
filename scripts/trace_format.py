"""Recorded traffic in memory: who asked when, how much, and which prompts share a beginning.

A prompt is a chain of block ids; two prompts share a block exactly when they share everything before it too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvhive.proto.errors import ConfigError

Json: TypeAlias = dict[str, Any]
Rows: TypeAlias = Iterable[tuple[str, Json]]
"""(file and line, object) of each line."""

MOST_TOKENS = 10_000_000
"""Of one prompt or answer: more is a damaged file."""

MOST_IDS = 1 << 31
"""Block ids are below this, and so are sessions and turns."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request."""

    arrival: float
    """Open traces: seconds. Closed ones: the session's start, in mean gaps between sessions."""
    session: int
    turn: int
    think_s: float
    """Closed traces, after the first turn: seconds between the last answer and this request."""
    prompt_tokens: int
    output_tokens: int
    runs: tuple[int, ...]
    """The prompt's blocks as start, length, start, length ...; together ceil(prompt_tokens / block size)."""

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (first id, how many) of each run."""
        return zip(self.runs[::2], self.runs[1::2], strict=True)


@dataclass(frozen=True, slots=True)
class Trace:
    """All requests of a trace, in the order of the file."""

    name: str
    block_size: int
    closed: bool
    """Whether a session's next request waits for the answer to the last one."""
    requests: Sequence[TraceRequest] = field(repr=False)

    @property
    def ids(self) -> int:
        """One more than the largest block id."""
        return max(start + count for request in self.requests for start, count in request.spans())


def number(where: str, row: Json, name: str, least: float, most: float) -> float:
    """Return a field of a line. Raises ConfigError naming the line, the field and its limits."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}: {name}: must be a number, is {value!r}")
    if not least <= value <= most:
        raise ConfigError(f"{where}: {name}: must be {least:g} to {most:g}, is {value:g}")
    return value


def whole(where: str, row: Json, name: str, least: int, most: int) -> int:
    """Return a field that is a whole number. Raises ConfigError."""
    value = number(where, row, name, least, most)
    if value != int(value):
        raise ConfigError(f"{where}: {name}: must be a whole number, is {value:g}")
    return int(value)
