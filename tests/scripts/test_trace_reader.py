"""Reading traces of every format, and saying what is wrong with them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from trace_files import opened, turn, write_trace

from kvhive.proto.errors import ConfigError
from kvhive.scripts.trace_arrivals import CLOSED_NATIVE_LOAD, Pace, plan_arrivals
from kvhive.scripts.trace_format import Trace, TraceRequest
from kvhive.scripts.trace_reader import read_trace


def test_a_trace_of_our_own_format_is_read_as_it_stands(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [opened(0.5, 40, [0, 3]), opened(1.5, 50, [0, 2, 7, 2], 9)])
    trace = read_trace(path)
    assert (trace.name, trace.block_size, trace.closed, trace.ids) == ("t", 16, False, 9)
    assert trace.requests[1] == TraceRequest(1.5, -1, 0, 0.0, 50, 9, (0, 2, 7, 2))


def test_a_gzipped_trace_is_the_same_trace(tmp_path: Path) -> None:
    plain = write_trace(tmp_path / "t.jsonl", [turn(0, 0, 16, [0, 1]), turn(0, 1, 32, [0, 2])], mode="closed")
    zipped = tmp_path / "zipped"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(zipped) == read_trace(plain)


def test_a_limit_takes_the_first_requests(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [opened(n, 16, [n, 1]) for n in range(5)])
    assert [request.arrival for request in read_trace(path, limit=2).requests] == [0, 1]


def test_mooncake_chains_share_exactly_their_common_beginning(tmp_path: Path) -> None:
    """The same hash after another parent is another block; timestamps are milliseconds."""
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [46, 47]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 6, "hash_ids": [46, 47, 48]},
        {"timestamp": 6000, "input_length": 1024, "output_length": 7, "hash_ids": [50, 47]},
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    assert (trace.block_size, trace.closed) == (512, False)
    assert [request.runs for request in trace.requests] == [(0, 2), (0, 3), (3, 2)]
    assert [request.arrival for request in trace.requests] == [0, 3, 6]


def test_lmcache_sessions_are_turns_one_after_the_other(tmp_path: Path) -> None:
    """Four bytes are a token, 64 a block; the calls of a session wait for each other."""
    system = "s" * 128
    rows = [
        {"timestamp": 1, "input": system, "output": "o" * 40, "session_id": "a"},
        {"timestamp": 2, "input": system + "x" * 64, "output": "", "session_id": "b"},
        {"timestamp": 3, "input": system + "y" * 65, "output": "o", "session_id": "a"},
    ]
    path = tmp_path / "agents.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    assert (trace.block_size, trace.closed) == (16, True)
    assert [request.runs for request in trace.requests] == [(0, 2), (0, 3), (0, 2, 3, 2)]
    assert [(r.session, r.turn, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0, 0, 32, 10),
        (1, 0, 48, 1),
        (0, 1, 49, 1),
    ]


def test_weka_sessions_share_their_tools_and_nothing_else(tmp_path: Path) -> None:
    """Ids are each session's own; sub-agents are left out; breaks are cut to a minute."""

    def asked(at: float, prompt: int, hashes: list[int], **more: float) -> dict[str, Any]:
        return {"t": at, "in": prompt, "out": 5, "hash_ids": hashes, **more}

    first = [
        asked(0, 130, [1, 2], api_time=4),
        {"type": "subagent", "requests": []},
        asked(6, 192, [1, 2, 3]),
    ]
    second = [asked(0, 192, [1, 2, 3]), asked(900, 200, [1, 2, 3], think_time=800)]
    rows = [{"block_size": 64, "tool_tokens": 64, "requests": requests} for requests in (first, second)]
    path = tmp_path / "weka.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    assert (trace.block_size, trace.closed) == (64, True)
    assert [request.runs for request in trace.requests] == [(0, 3), (0, 2, 3, 1), (0, 1, 4, 2), (0, 1, 4, 3)]
    assert [(r.session, r.turn, r.think_s) for r in trace.requests] == [
        (0, 0, 0),
        (0, 1, 2),
        (1, 0, 0),
        (1, 1, 60),
    ]
    assert len(read_trace(path, limit=3).requests) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in": 0}, "t.jsonl:3: in: must be 1 to"),
        ({"in": "many"}, "t.jsonl:3: in: must be a number, is 'many'"),
        ({"in": 16.5}, "t.jsonl:3: in: must be a whole number"),
        ({"in": 100}, "t.jsonl:3: r: has 1 blocks, 100 tokens of `in` take 7 of 16"),
        ({"out": -1}, "t.jsonl:3: out: must be 0 to"),
        ({"t": None}, "t.jsonl:3: t: must be a number, is None"),
        ({"r": [0]}, r"t.jsonl:3: r: must be \[start, length"),
        ({"r": [-1, 1]}, r"t.jsonl:3: r: must be \[start, length"),
    ],
)
def test_an_error_names_line_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_trace(tmp_path / "t.jsonl", [opened(0, 16, [0, 1]), {**opened(1, 16, [0, 1]), **change}])
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.jsonl: the trace is empty"),
        ('{"format": "kvtrace-1", "mode": "open", "block_size": 16}', "the trace has no requests"),
        ('{"format": "kvtrace-2"}', "t.jsonl:1: format: must be 'kvtrace-1', is 'kvtrace-2'"),
        ('{"format": "kvtrace-1", "mode": "ajar"}', "mode: must be 'open' or 'closed', is 'ajar'"),
        ('{"format": "kvtrace-1", "mode": "open", "block_size": 0}', "block_size: must be 1 to"),
        ('{"prompt": "hello"}', "t.jsonl:1: neither a kvtrace-1 header nor"),
        ("[1]", "t.jsonl:1: not a JSON object"),
        ("not json", "t.jsonl:1: not JSON: "),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "must be 2 whole"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"format": "kvtrace-1"}')[:30])
    with pytest.raises(ConfigError, match=r"t\.jsonl\.gz: damaged: "):
        read_trace(path)


def trace_of(closed: bool, *requests: TraceRequest) -> Trace:
    return Trace("t", 16, closed, requests)


def request_at(arrival: float, session: int = -1, number: int = 0, prompt: int = 100) -> TraceRequest:
    return TraceRequest(arrival, session, number, 1.0, prompt, 4, (0, -(-prompt // 16)))


def test_a_rate_compresses_an_open_trace_and_begins_at_zero() -> None:
    trace = trace_of(False, request_at(10), request_at(14), request_at(18))
    assert plan_arrivals(trace, Pace(rate=4), 1, lambda tokens: 1.0).starts == ((0, 0), (1, 1), (2, 2))


def test_a_load_is_demand_over_capacity() -> None:
    """Three prompts of 1 s on two workers at load 0.5 take 3 s."""
    trace = trace_of(False, request_at(0), request_at(1), request_at(2))
    schedule = plan_arrivals(trace, Pace(load=0.5), 2, lambda tokens: tokens / 100)
    assert schedule.starts[-1][0] == pytest.approx(3.0)
    assert schedule.load == pytest.approx(0.5)


def test_sessions_start_by_gaps_and_later_turns_wait() -> None:
    """Natively at CLOSED_NATIVE_LOAD; the file's order of turns does not matter."""
    trace = trace_of(True, request_at(0, 0, 0), request_at(0, 0, 2), request_at(0, 0, 1), request_at(2, 1, 0))
    schedule = plan_arrivals(trace, Pace(), 1, lambda tokens: 1.0)
    assert [number for _, number in schedule.starts] == [0, 3]
    assert schedule.after == {0: 2, 2: 1}
    assert schedule.starts[-1][0] == pytest.approx(4.0 / CLOSED_NATIVE_LOAD)


def test_a_turn_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="session 0 has the same turn twice"):
        plan_arrivals(trace_of(True, request_at(0, 0), request_at(0, 0)), Pace(), 1, lambda tokens: 1.0)


def test_a_coarse_clock_is_spread_evenly_and_always_alike() -> None:
    """Forty requests at ticks of 3 s come at forty moments, each within its tick."""
    trace = trace_of(False, *(request_at(3.0 * (n // 10)) for n in range(40)))
    starts, again = (plan_arrivals(trace, Pace(), 1, lambda tokens: 1.0, seed=7).starts for _ in range(2))
    assert starts == again
    assert len({at for at, _ in starts}) == 40
    first = starts[0][0]
    assert all(abs((at - first) - 3.0 * (number // 10)) <= 3.0 for at, number in starts)
