"""Reads recorded traffic: who asked when, how much, and which prompts share a beginning.

    kvtrace-1   a header line, then one request a line, its prompt as run-length coded chain ids
    Mooncake    timestamp (ms), input_length, output_length, hash_ids of 512 tokens
    LMCache     timestamp (us), input and output as text, session_id

In memory all are the same: a prompt is a chain of block ids, and two prompts share a block exactly when they
share everything before it too. Files may be gzipped. Every error names the file, the line and the field.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from kvhive.proto.errors import ConfigError

Json: TypeAlias = dict[str, Any]
Rows: TypeAlias = Iterable[tuple[str, Json]]

KVTRACE = "kvtrace-1"
MOONCAKE_BLOCK = 512
LMCACHE_BLOCK = 16
LMCACHE_BYTES_PER_TOKEN = 4
"""The LMCache traces hold text; four bytes of it stand for a token, whatever the tokenizer."""

LMCACHE_THINK_S = 1.0
"""Between an answer and the next call of an agent's run, whose recorded times include the model's."""

MOST_TOKENS = 10_000_000
"""Of one prompt or answer: more is a damaged file."""

MOST_IDS = 1 << 31


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


def read_trace(path: Path, limit: int = 0) -> Trace:
    """Read a trace of any format above, only its first `limit` requests where that is not 0.

    Raises ConfigError, OSError.
    """
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{path.name}: the trace is empty")
    where, row = first
    if "format" in row:
        trace = _kvtrace(where, row, itertools.islice(rows, limit or None))
    else:
        all_rows = itertools.islice(itertools.chain((first,), rows), limit or None)
        if "hash_ids" in row:
            trace = _mooncake(path.name, all_rows)
        elif "input" in row and "session_id" in row:
            trace = _lmcache(path.name, all_rows)
        else:
            raise ConfigError(f"{where}: neither a {KVTRACE} header nor a Mooncake or LMCache request")
    if not trace.requests:
        raise ConfigError(f"{path.name}: the trace has no requests")
    return trace


def _rows(path: Path) -> Iterator[tuple[str, Json]]:
    """Yield (where, object) of every line that is not blank."""
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path.name}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path.name}:{number}: not a JSON object")
        yield f"{path.name}:{number}", row


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rt") if zipped else path.open("rt") as lines:
            yield from lines
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path.name}: damaged: {error}") from error


def _number(where: str, row: Json, name: str, least: float, most: float) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}: {name}: must be a number, is {value!r}")
    if not least <= value <= most:
        raise ConfigError(f"{where}: {name}: must be {least:g} to {most:g}, is {value:g}")
    return value


def _whole(where: str, row: Json, name: str, least: int, most: int) -> int:
    value = _number(where, row, name, least, most)
    if value != int(value):
        raise ConfigError(f"{where}: {name}: must be a whole number, is {value:g}")
    return int(value)


def _kvtrace(where: str, header: Json, rows: Rows) -> Trace:
    if header["format"] != KVTRACE:
        raise ConfigError(f"{where}: format: must be {KVTRACE!r}, is {header['format']!r}")
    mode = header.get("mode")
    if mode not in ("open", "closed"):
        raise ConfigError(f"{where}: mode: must be 'open' or 'closed', is {mode!r}")
    block = _whole(where, header, "block_size", 1, 65_536)
    requests = [_kvtrace_request(at, row, block, mode == "closed") for at, row in rows]
    return Trace(str(header.get("name", "")), block, mode == "closed", requests)


def _kvtrace_request(where: str, row: Json, block: int, closed: bool) -> TraceRequest:
    prompt = _whole(where, row, "in", 1, MOST_TOKENS)
    runs = row.get("r")
    if not isinstance(runs, list) or len(runs) % 2 or not all(type(n) is int and n >= 0 for n in runs):
        raise ConfigError(f"{where}: r: must be [start, length, ...] of whole numbers, is {str(runs)[:80]}")
    blocks, wanted = sum(runs[1::2]), -(-prompt // block)
    if blocks != wanted:
        raise ConfigError(
            f"{where}: r: has {blocks} blocks, {prompt} tokens of `in` take {wanted} of {block}"
        )
    if any(start + count > MOST_IDS for start, count in zip(runs[::2], runs[1::2], strict=True)):
        raise ConfigError(f"{where}: r: block ids must be below {MOST_IDS}")
    session = _whole(where, row, "s", -1, MOST_IDS) if closed else -1
    return TraceRequest(
        arrival=_number(where, row, "t", 0, 1e12),
        session=session,
        turn=_whole(where, row, "k", 0, MOST_IDS) if closed else 0,
        think_s=_number(where, row, "th", 0, 1e9) if closed and row.get("k") else 0.0,
        prompt_tokens=prompt,
        # An answer without a token is still waited for until its first.
        output_tokens=max(1, _whole(where, row, "out", 0, MOST_TOKENS)),
        runs=tuple(runs),
    )


class _Chains:
    """Gives every distinct prefix of blocks one number: contents may repeat, positions in a trie do not."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, object], int] = {}

    def runs(self, contents: Iterable[object]) -> tuple[int, ...]:
        """Return a chain's ids, run-length coded."""
        runs: list[int] = []
        parent = -1
        for content in contents:
            parent = self._ids.setdefault((parent, content), len(self._ids))
            if runs and runs[-2] + runs[-1] == parent:
                runs[-1] += 1
            else:
                runs += [parent, 1]
        return tuple(runs)


def _mooncake(name: str, rows: Rows) -> Trace:
    chains, requests = _Chains(), []
    for where, row in rows:
        prompt = _whole(where, row, "input_length", 1, MOST_TOKENS)
        hashes, wanted = row.get("hash_ids"), -(-prompt // MOONCAKE_BLOCK)
        if not isinstance(hashes, list) or len(hashes) != wanted or not all(type(h) is int for h in hashes):
            raise ConfigError(f"{where}: hash_ids: must be {wanted} whole numbers for {prompt} tokens")
        output = max(1, _whole(where, row, "output_length", 0, MOST_TOKENS))
        at = _number(where, row, "timestamp", 0, 1e15) / 1000
        requests.append(TraceRequest(at, -1, 0, 0.0, prompt, output, chains.runs(hashes)))
    return Trace(name, MOONCAKE_BLOCK, False, requests)


def _lmcache(name: str, rows: Rows) -> Trace:
    chains, requests = _Chains(), []
    sessions: dict[str, list[int]] = {}  # session -> [number, turns so far]
    size = LMCACHE_BLOCK * LMCACHE_BYTES_PER_TOKEN
    for where, row in rows:
        for text in ("input", "output"):
            if not isinstance(row.get(text), str):
                raise ConfigError(f"{where}: {text}: must be text, is {str(row.get(text))[:80]}")
        prompt = row["input"].encode()
        session = sessions.setdefault(str(row.get("session_id")), [len(sessions), 0])
        pieces = (prompt[at : at + size] for at in range(0, max(1, len(prompt)), size))
        requests.append(
            TraceRequest(
                arrival=float(session[0]),
                session=session[0],
                turn=session[1],
                think_s=LMCACHE_THINK_S if session[1] else 0.0,
                prompt_tokens=max(1, -(-len(prompt) // LMCACHE_BYTES_PER_TOKEN)),
                output_tokens=max(1, len(row["output"].encode()) // LMCACHE_BYTES_PER_TOKEN),
                runs=chains.runs(pieces),
            )
        )
        session[1] += 1
    return Trace(name, LMCACHE_BLOCK, True, requests)
