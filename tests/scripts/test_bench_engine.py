"""The benchmark's client, order of runs, figures and exit status, against servers that are trivial."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest
from sse_server import sse_server

from kvhive.proto.errors import ConfigError
from kvhive.scripts.bench_client import BenchClient, Timing
from kvhive.scripts.bench_engine import parse_addresses, parse_plan
from kvhive.scripts.bench_report import medians, ratios, table
from kvhive.scripts.bench_run import Plan, RunResult, Target, measure, percentile
from kvhive.scripts.bench_workloads import WARM_UP, WORKLOADS, Ask, TokenRange, workload

ASK = Ask((5, 6, 7), 4)


def client(url: str, timeout_s: float = 10.0) -> BenchClient:
    return BenchClient(url, "m", timeout_s, time.perf_counter)


def test_workloads_are_what_they_say_and_follow_the_seed() -> None:
    ids = TokenRange()
    shapes = {}
    for name in WORKLOADS:
        work = workload(name, "s", ids)
        assert work == workload(name, "s", ids)
        assert all(ids.first <= token <= ids.last for ask in work.asks for token in ask.prompt)
        other = {ask.prompt for ask in workload(name, "t", ids).asks}
        assert not other & {ask.prompt for ask in work.asks}
        ((length, output),) = {(len(ask.prompt), ask.max_tokens) for ask in work.asks}
        shapes[name] = (len(work.asks), work.concurrency, length, output)
    assert shapes == {
        "a": (64, 8, 1088, 64),
        "b": (32, 8, 64, 128),
        "c": (16, 8, 2048, 4),
        "d": (4, 1, 64, 128),
    }
    prompts = [ask.prompt for ask in workload("a", "s", ids).asks]
    assert len({prompt[:1024] for prompt in prompts}) == 1 and len({prompt[:1025] for prompt in prompts}) > 32


async def test_a_request_is_timed_and_counted() -> None:
    async with sse_server() as server:
        server.delay_s = 0.02
        timing = await client(server.url).complete(ASK)
        assert timing.error == ""
        assert (timing.prompt_tokens, timing.completion_tokens, timing.cached_tokens) == (3, 4, 3)
        assert len(timing.news_s) == 4 and timing.news_s == sorted(timing.news_s)
        assert timing.news_s[1] - timing.news_s[0] > 0.01 and timing.total_s > timing.news_s[3]
        (body,) = server.asked
        assert (body["model"], body["prompt"], body["temperature"], body["ignore_eos"]) == (
            "m",
            [5, 6, 7],
            0,
            True,
        )


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("busy", "ExchangeFailed: status 429: full"),
        ("broken", "the worker was lost"),
        ("short", "ExchangeFailed: 3 tokens of output, asked for 4"),
        ("cut", "RemoteProtocolError"),
        ("hangs", "no end within 0.3 s"),
    ],
)
async def test_what_goes_wrong_is_counted_not_raised(model: str, error: str) -> None:
    async with sse_server(model) as server:
        timing = await client(server.url, 0.3).complete(ASK)
        assert error in timing.error


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    timing = await client("http://127.0.0.1:1").complete(ASK)
    assert "Connect" in timing.error or "refused" in timing.error


async def test_targets_take_turns_with_the_same_prompts_new_in_every_run() -> None:
    async with sse_server() as one, sse_server() as two:
        targets = [Target(name, server.url, "m", {}) for name, server in (("one", one), ("two", two))]
        seen: list[RunResult] = []
        plan = Plan(("d", "b"), 2, "s", TokenRange(), 10.0)
        results = await measure(targets, plan, time.perf_counter, seen.append)
        assert seen == results and not any(result.failures for result in results)
        order = [(result.run, result.workload, result.target) for result in results]
        assert order == [
            *((0, name, target) for name in ("d", "b") for target in ("one", "two")),
            *((1, name, target) for name in ("d", "b") for target in ("two", "one")),
        ]
        assert sorted(body["prompt"] for body in one.asked) == sorted(body["prompt"] for body in two.asked)
        assert len({tuple(body["prompt"]) for body in one.asked}) == 8 + 2 * (4 + 32)
        assert one.busiest == 8


async def test_a_target_that_was_just_measured_gets_time_to_come_to_rest() -> None:
    async with sse_server() as one, sse_server() as two:
        targets = [Target(name, server.url, "m", {}) for name, server in (("one", one), ("two", two))]
        ended: list[float] = []
        began = time.perf_counter()
        plan = Plan(("d",), 1, "s", TokenRange(), 10.0, pause_s=0.3)
        results = await measure(targets, plan, time.perf_counter, lambda _: ended.append(time.perf_counter()))
        walls = [result.wall_s for result in results]
        assert ended[0] - walls[0] - began >= 0.3 and ended[1] - walls[1] - ended[0] >= 0.3


async def test_the_client_is_far_faster_than_an_engine() -> None:
    """Its processor time bounds what it can disturb: under 0.3 ms a token, where engines take 3 and more."""
    async with sse_server() as server:
        plan = Plan(("b",), 1, "s", TokenRange(), 60.0)
        (result,) = await measure([Target("x", server.url, "m", {})], plan, time.perf_counter, lambda r: None)
        assert not result.failures
        assert result.client_cpu_s / (32 * 128) < 3e-4  # the server is in this process, too


def fake(target: str, run: int, wall_s: float, news_s: list[float], error: str = "") -> RunResult:
    timing = Timing(news_s, news_s[-1], 100, 10, 64, error)
    return RunResult("b", run, target, wall_s, (0.0, 0.0, 0.0), 0.0, (timing,))


RESULTS = [
    fake("ours", 0, 1.0, [0.1, 0.2, 0.4]),
    fake("peer", 0, 2.0, [0.2, 0.4, 0.8]),
    fake("peer", 1, 3.0, [0.3, 0.4, 0.5]),
    fake("ours", 1, 1.0, [0.1, 0.2, 0.3]),
]


def test_figures_are_medians_and_ratios_go_run_against_run() -> None:
    ours = medians(RESULTS)["b"]["ours"]
    assert ours["output_tok_s"] == 10 and ours["total_tok_s"] == 110 and ours["cached_tokens"] == 64
    assert ours["ttft_p50_ms"] == pytest.approx(100) and ours["gap_p99_ms"] == pytest.approx(150)
    beside = ratios(RESULTS, "ours")["b"]["peer"]
    assert beside["output_tok_s"] == pytest.approx(2.5)
    assert beside["ttft_p50_ms"] == pytest.approx(2.5)
    lines = "\n".join(table(RESULTS, [Target(n, "", "", {}) for n in ("ours", "peer")], plan_of("b", 2)))
    assert "ours / peer" in lines and "2.50" in lines


def test_a_run_that_failed_has_no_figures_and_no_ratio() -> None:
    results = [fake("ours", 0, 1.0, [0.1]), fake("peer", 0, 1.0, [0.1], "boom")]
    assert medians(results)["b"]["peer"]["output_tok_s"] is None
    assert ratios(results, "ours")["b"]["peer"]["ttft_p50_ms"] is None
    assert "-" in "\n".join(
        table(results, [Target(n, "", "", {}) for n in ("ours", "peer")], plan_of("b", 1))
    )


def plan_of(workloads: str, runs: int) -> Plan:
    return parse_plan(workloads, runs, "s", 5.0, 0.0)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, rank) for rank in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 99) == 7.0 and percentile([], 50) is None


def test_targets_are_named_and_never_twice() -> None:
    assert parse_addresses("http://h:1", ["vllm=http://h:2/v1/", "https://h:3"]) == [
        ("kvhive", "http://h:1"),
        ("vllm", "http://h:2"),
        ("h:3", "https://h:3"),
    ]
    for urls, message in (
        ([], "nothing to measure"),
        (["h:2"], "must be"),
        (["http://h:2", "x=http://h:2/v1"], "the URL http://h:2 is there twice"),
        (["x=http://h:2", "x=http://h:3"], "the name x is there twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_addresses(None, urls)
    with pytest.raises(ConfigError, match="--workload: must be some of a,b,c,d, has 'e'"):
        parse_plan("a,e", 1, "", 1.0, 0.0)
    assert parse_plan("a", 1, "", 1.0, 0.0).seed != parse_plan("a", 1, "", 1.0, 0.0).seed
    assert WARM_UP not in WORKLOADS


async def bench(tmp_path: Path, *arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "kvhive.scripts.cli", "bench", "engine", "--only-urls", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_command_prints_writes_and_tells_failures_by_its_status(tmp_path: Path) -> None:
    async with sse_server() as good, sse_server() as bad:
        urls = ("--url", f"good={good.url}", "--url", f"bad={bad.url}/v1", "--workload", "d", "--runs", "1")
        status, out, err = await bench(tmp_path, *urls, "--json", "r.json", "--seed", "s")
        assert status == 0, err
        assert "good / bad" in out and "run 1/1 (d) good" in err
        document = json.loads((tmp_path / "r.json").read_text())
        assert document["plan"]["seed"] == "s" and document["machine"]["cores"] >= 1
        assert [run["target"] for run in document["runs"]] == ["good", "bad"]
        assert len(document["runs"][0]["requests"][0]["news_s"]) == 128
        assert document["ratios"]["d"]["bad"]["output_tok_s"] > 0
        bad.model = "short"
        status, out, err = await bench(tmp_path, *urls)
        assert status == 1 and "4 FAILED" in err and "127 tokens of output, asked for 128" in err
        status, _, err = await bench(tmp_path, *urls, "--model", "other")
        assert status == 1 and "good: serves good, not other" in err
    status, _, err = await bench(tmp_path, "--url", good.url)
    assert status == 1 and err.startswith("kvhive: ") and err.count("\n") == 1


async def test_a_figure_needs_matplotlib_and_says_so_first(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    code = "import sys; sys.path.insert(0, '.'); from kvhive.scripts.cli import main; main()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", code, "bench", "engine", "--only-urls"),
        *("--url", "http://127.0.0.1:1", "--png", "x.png"),
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    _, err = await process.communicate()
    assert process.returncode == 1 and b"pip install 'kvhive[bench]'" in err
