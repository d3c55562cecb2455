"""Reads recorded traffic: our own kvtrace-1, or what its publishers have (trace_originals.py); also gzipped.

kvtrace-1 is a header line, then one request a line: `t` seconds (closed traces: mean gaps between sessions),
`s` session, `k` turn, `th` seconds of thought before it, `in` and `out` tokens, `r` its blocks as start,
length, start, length ... Formats are told by their content. Every error names the file, the line and the
field.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvhive.proto.errors import ConfigError
from kvhive.scripts.trace_format import MOST_IDS, MOST_TOKENS, Json, Rows, Trace, TraceRequest, number, whole
from kvhive.scripts.trace_originals import read_lmcache, read_mooncake, read_weka

KVTRACE = "kvtrace-1"


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
            trace = read_mooncake(path.name, all_rows)
        elif "requests" in row:
            trace = read_weka(path.name, itertools.chain((first,), rows), limit)
        elif "input" in row and "session_id" in row:
            trace = read_lmcache(path.name, all_rows)
        else:
            raise ConfigError(f"{where}: neither a {KVTRACE} header nor a Mooncake, LMCache or WEKA line")
    if not trace.requests:
        raise ConfigError(f"{path.name}: the trace has no requests")
    return trace


def _rows(path: Path) -> Iterator[tuple[str, Json]]:
    """Yield (where, object) of every line that is not blank."""
    for place, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path.name}:{place}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path.name}:{place}: not a JSON object")
        yield f"{path.name}:{place}", row


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rt") if zipped else path.open("rt") as lines:
            yield from lines
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path.name}: damaged: {error}") from error


def _kvtrace(where: str, header: Json, rows: Rows) -> Trace:
    if header["format"] != KVTRACE:
        raise ConfigError(f"{where}: format: must be {KVTRACE!r}, is {header['format']!r}")
    mode = header.get("mode")
    if mode not in ("open", "closed"):
        raise ConfigError(f"{where}: mode: must be 'open' or 'closed', is {mode!r}")
    block = whole(where, header, "block_size", 1, 65_536)
    requests = [_kvtrace_request(at, row, block, mode == "closed") for at, row in rows]
    return Trace(str(header.get("name", "")), block, mode == "closed", requests)


def _kvtrace_request(where: str, row: Json, block: int, closed: bool) -> TraceRequest:
    prompt = whole(where, row, "in", 1, MOST_TOKENS)
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
    session = whole(where, row, "s", -1, MOST_IDS) if closed else -1
    return TraceRequest(
        arrival=number(where, row, "t", 0, 1e12),
        session=session,
        turn=whole(where, row, "k", 0, MOST_IDS) if closed else 0,
        think_s=number(where, row, "th", 0, 1e9) if closed and row.get("k") else 0.0,
        prompt_tokens=prompt,
        # An answer without a token is still waited for until its first.
        output_tokens=max(1, whole(where, row, "out", 0, MOST_TOKENS)),
        runs=tuple(runs),
    )
