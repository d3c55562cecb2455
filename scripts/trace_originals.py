"""Traces as their publishers have them.

Mooncake    timestamp (ms), input_length, output_length, hash_ids of 512 tokens
LMCache     timestamp (us), input and output as text, session_id
WEKA        one session a line: block_size, requests with t, in, out, hash_ids, think_time or api_time
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvhive.proto.errors import ConfigError
from kvhive.scripts.trace_format import MOST_TOKENS, Json, Rows, Trace, TraceRequest, number, whole

MOONCAKE_BLOCK = 512
LMCACHE_BLOCK = 16
LMCACHE_BYTES_PER_TOKEN = 4
"""The LMCache traces hold text; four bytes of it stand for a token, whatever the tokenizer."""

LMCACHE_THINK_S = 1.0
"""Between an answer and the next call of an agent's run, whose recorded times include the model's."""

WEKA_LONGEST_THINK_S = 60.0
"""Longer breaks are cut to this: people who went away, not what a fleet is planned for."""


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


def read_mooncake(name: str, rows: Rows) -> Trace:
    """Read an open trace. Raises ConfigError."""
    chains, requests = _Chains(), []
    for where, row in rows:
        prompt = whole(where, row, "input_length", 1, MOST_TOKENS)
        hashes, wanted = row.get("hash_ids"), -(-prompt // MOONCAKE_BLOCK)
        if not isinstance(hashes, list) or len(hashes) != wanted or not all(type(h) is int for h in hashes):
            raise ConfigError(f"{where}: hash_ids: must be {wanted} whole numbers for {prompt} tokens")
        output = max(1, whole(where, row, "output_length", 0, MOST_TOKENS))
        at = number(where, row, "timestamp", 0, 1e15) / 1000
        requests.append(TraceRequest(at, -1, 0, 0.0, prompt, output, chains.runs(hashes)))
    return Trace(name, MOONCAKE_BLOCK, False, requests)


def read_lmcache(name: str, rows: Rows) -> Trace:
    """Read a closed trace: the calls of a session wait for each other. Raises ConfigError."""
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


def read_weka(name: str, rows: Rows, limit: int) -> Trace:
    """Read a closed trace of sessions, without their sub-agents. Raises ConfigError.

    Block ids are each session's own. Sessions with equal `tool_tokens` are taken to share the tools' blocks,
    and with equal `system_tokens` too the system prompt's: the format does not say.
    """
    chains, requests, block = _Chains(), [], 0
    for session, (where, row) in enumerate(rows):
        size = whole(where, row, "block_size", 1, 65_536)
        if block and size != block:
            raise ConfigError(f"{where}: block_size: must be {block} as in the first session, is {size}")
        block = size
        for turn, (at, asked, think_s) in enumerate(_weka_turns(where, row)):
            prompt = whole(at, asked, "in", 1, MOST_TOKENS)
            hashes, most = asked.get("hash_ids"), -(-prompt // block)
            if not isinstance(hashes, list) or not all(type(h) is int for h in hashes) or len(hashes) > most:
                raise ConfigError(f"{at}: hash_ids: must be at most {most} whole numbers for {prompt} tokens")
            # Blocks that are not full have no id; nobody shares them.
            tail = [(session, turn, place) for place in range(len(hashes), most)]
            contents = [*_weka_contents(session, row, block, hashes), *tail]
            output = max(1, whole(at, asked, "out", 0, MOST_TOKENS))
            runs = chains.runs(contents)
            requests.append(TraceRequest(float(session), session, turn, think_s, prompt, output, runs))
            if len(requests) == limit:
                return Trace(name, block, True, requests)
    return Trace(name, block, True, requests)


def _weka_turns(where: str, row: Json) -> Iterator[tuple[str, Json, float]]:
    """Yield (where, request, seconds since the last answer) of a session's own requests."""
    asked = row.get("requests")
    if not isinstance(asked, list) or not all(isinstance(each, dict) for each in asked):
        raise ConfigError(f"{where}: requests: must be a list of objects")
    answered_at = None
    for place, each in enumerate(asked):
        at = f"{where}: requests[{place}]"
        if "hash_ids" not in each:  # a sub-agent, with requests of its own
            continue
        began = number(at, each, "t", 0, 1e12)
        think_s = 0.0 if answered_at is None else max(0.0, began - answered_at)
        if each.get("think_time") is not None:
            think_s = number(at, each, "think_time", 0, 1e12)
        answered_at = began + (number(at, each, "api_time", 0, 1e12) if "api_time" in each else 0.0)
        yield at, each, min(think_s, WEKA_LONGEST_THINK_S)


def _weka_contents(session: int, row: Json, block: int, hashes: Iterable[int]) -> Iterator[object]:
    tools, system = (int(row.get(name) or 0) for name in ("tool_tokens", "system_tokens"))
    for place, content in enumerate(hashes):
        end = (place + 1) * block
        if end <= tools:
            yield "tools", tools, place
        elif end <= tools + system:
            yield "system", tools, system, place
        else:
            yield session, content
