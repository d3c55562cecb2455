"""A sweep: what is run, what is not run again, and what its summary says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from trace_files import turn, write_trace

from kvhive.scripts.simulate_sweep import Cell, cells_of, compare, geometric_mean, main, read_rows, summary


@pytest.fixture(autouse=True)
def no_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.nice", lambda more: more)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        turn(s, k, 64 * (k + 1) + 1, [10 * s, 4 * (k + 1), 500 + 10 * s + k, 1])
        for s in range(6)
        for k in range(2)
    ]
    return write_trace(tmp_path / "little.jsonl", rows, mode="closed")


def run(file: Path, *arguments: str | Path) -> str:
    result = CliRunner().invoke(main, [str(file), *map(str, arguments), "--workers", "2"])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_cell_is_run_once_and_a_policy_again_when_asked(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    run(file, trace, "--policy", "kv_aware")
    assert set(read_rows(file)) == {(cell, "kv_aware") for cell in cells_of("little")}
    run(file, trace, "--policy", "kv_aware,dynamo")
    assert len(file.read_text().splitlines()) == 16
    output = run(file, trace, "--policy", "kv_aware,dynamo", "--redo", "kv_aware")
    assert len(file.read_text().splitlines()) == 24
    assert len(read_rows(file)) == 16
    assert "geometric mean" in output


def row(policy: str, mean: float, p99: float, hit: float, share: float = 0.5) -> dict[str, object]:
    return {
        "trace": "t", "share": share, "load": 0.9, "policy": policy,
        "ttft_mean_s": mean, "ttft_p99_s": p99, "token_hit_rate": hit,
    }  # fmt: skip


def test_ours_is_compared_with_the_best_other_of_each_cell(tmp_path: Path) -> None:
    """The hit rate only with those that are no slower."""
    file = tmp_path / "sweep.jsonl"
    rows = [
        row("kv_aware", 2.0, 4.0, 0.5), row("a", 1.0, 8.0, 0.6), row("b", 4.0, 2.0, 0.9),
        row("kv_aware", 1.0, 1.0, 0.5, share=0.0), row("a", 2.0, 2.0, 0.9, share=0.0),
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, rows)))
    first, second = compare(read_rows(file))
    assert (first.cell, first.mean, first.best_mean, first.p99, first.best_p99) == (
        Cell("t", 0.5, 0.9), 2.0, "a", 2.0, "b"
    )  # fmt: skip
    assert first.hit_gap == pytest.approx(0.1)
    assert (second.mean, second.p99, second.hit_gap) == (0.5, 0.5, 0.0)
    text = "\n".join(summary([first, second]))
    assert "TTFT mean: geometric mean 1.000 of the best policy's, worst 2.00 in t pool 50% load 0.9" in text
    assert geometric_mean([first.mean, second.mean]) == pytest.approx(1.0)


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    file.write_text("{}\n")
    result = CliRunner().invoke(main, [str(file), "--summary"])
    assert result.exit_code == 1
    assert "sweep.jsonl:1: not a line of a sweep" in result.output
