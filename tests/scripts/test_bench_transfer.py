"""kvhive bench transfer: what is measured, how a choice is judged, and the picture."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvhive.proto.errors import ConfigError
from kvhive.proto.index_schema import LoadReport
from kvhive.router.routing_cost import compare
from kvhive.router.routing_policy import RouteRequest
from kvhive.scripts import (
    bench_transfer,
    bench_transfer_channel,
    bench_transfer_choice,
    bench_transfer_figure,
)
from kvhive.scripts.bench_transfer_channel import Cell, Placed
from kvhive.scripts.bench_transfer_choice import Outcome
from kvhive.scripts.cli import cli
from kvhive.scripts.used_pool import used_places


def outcome(pull_s: float, compute_s: float, chose_pull: bool) -> Outcome:
    return Outcome(512, 4, 1e8, pull_s, compute_s, compute_s / pull_s, chose_pull)


def test_a_choice_is_right_when_the_faster_way_was_chosen() -> None:
    assert outcome(1.0, 2.0, True).right and not outcome(1.0, 2.0, False).right
    assert outcome(2.0, 1.0, False).right and not outcome(2.0, 1.0, True).right
    assert outcome(1.0, 1.09, True).tied and not outcome(1.0, 1.2, True).tied


@pytest.mark.parametrize(("bytes_per_s", "pulls"), [(1e9, True), (1e6, False)])
def test_the_choice_is_the_router_s_own_from_what_the_worker_reports(bytes_per_s: float, pulls: bool) -> None:
    load = LoadReport(
        blocks_total=512,
        blocks_free=512,
        step_per_token_s=0.001,
        max_step_tokens=512,
        block_bytes=131072,
        pull_bytes_per_s=bytes_per_s,
    )
    rows = [bench_transfer_choice._candidate(n, load, held) for n, held in (("target", 2), ("source", 10))]
    costs = compare(RouteRequest(200, 1, 16, b""), rows)
    assert bool(costs[0].pulled_blocks) == pulls


@pytest.mark.timeout(300)
def test_a_quick_run_prints_one_object_with_its_ratio_and_gives_the_cores_back() -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    result = CliRunner().invoke(
        cli, ["bench", "transfer", "--quick", "--no-grid", "--rounds", "3", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0
    document: dict[str, Any] = json.loads(result.stdout)
    (cell,) = document["channel"]
    assert document["transfer_ratio"] == cell["transfer_ratio"] > 0
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, threads)
    assert (cell["block_bytes"], cell["chain_bytes"], cell["placed"]) == (2**19, 4 * 2**20, "in a row")
    assert cell["plain_gb_s"] > 0 and cell["chain_gb_s"] > 0 and cell["gloo_gb_s"] > 0
    assert cell["same_job_ratio"] == cell["transfer_ratio"], "in a row there is nothing to collect"


def test_a_small_chain_has_as_many_turns_as_move_what_a_large_one_does() -> None:
    assert [Cell(2**14, mib * 2**20).turns for mib in (4, 64, 256)] == [16, 1, 1]


def test_chains_that_do_not_lie_in_a_row_are_measured_beside_the_same_job_of_torch_alone() -> None:
    cells = [Cell(16 * 1024, 2**20, placed) for placed in (Placed.USED, Placed.SCATTERED)]
    for cell in bench_transfer_channel.measure(cells, rounds=1):
        assert cell["same_job_ratio"] > 0 and cell["same_job_ratio"] != cell["transfer_ratio"]


def test_a_used_pool_gives_a_chain_short_rows_and_no_place_twice() -> None:
    places = used_places(64, 256, seed=3)
    assert len(set(places)) == 64 and all(0 <= place < 256 for place in places)
    assert places == used_places(64, 256, seed=3) != used_places(64, 256, seed=4)
    beside = sum(after == before + 1 for before, after in pairwise(places))
    assert 16 <= beside <= 62, "neither one row nor none"
    with pytest.raises(ValueError, match="blocks: must be at most half of the pool's 256, is 129"):
        used_places(129, 256, seed=3)
    with pytest.raises(ValueError, match="pool_blocks: must be at least 32, is 31"):
        used_places(2, 31, seed=3)
    for cell in bench_transfer.CELLS:
        assert len(used_places(cell.blocks, cell.pool_blocks, seed=0)) == cell.blocks


def test_the_table_marks_what_was_right_wrong_and_tied() -> None:
    cells = [
        {"context": 0, "missing": 4, "bytes_per_s": 1e8, "pull_s": 0.1, "compute_s": 0.2, "chose_pull": c}
        for c in (True, False, True)
    ]
    verdicts = [
        {"right": True, "tied": False},
        {"right": False, "tied": False},
        {"right": False, "tied": True},
    ]
    grid = [{**cell, **verdict} for cell, verdict in zip(cells, verdicts, strict=True)]
    ratios = {"choice_right_ratio": 2 / 3, "choice_strictly_right_ratio": 1 / 3}
    text = "\n".join(bench_transfer._lines({"channel": [], "grid": grid, **ratios}))
    assert "pull (right)" in text and "compute (WRONG)" in text and "pull (tie)" in text
    assert "right in 67 % of the cells, 33 % without the ties" in text


def test_the_picture_is_a_png_or_says_what_is_missing(tmp_path: Path) -> None:
    grid = [
        {"context": c, "missing": m, "bytes_per_s": b, "pull_s": 0.1, "compute_s": 0.2, "chose_pull": True}
        for c in (0, 512)
        for m in (4, 16)
        for b in (1e7, 1e8)
    ]
    path = tmp_path / "crossover.png"
    try:
        bench_transfer_figure.draw(path, {"grid": grid})
    except ConfigError as error:
        assert "matplotlib" in str(error)
    else:
        assert path.read_bytes().startswith(b"\x89PNG")
