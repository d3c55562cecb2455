"""`kvhive bench transfer`: how fast blocks move, and whether pulling is chosen where it is faster."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvhive.scripts import bench_transfer_channel, bench_transfer_choice
from kvhive.scripts.bench_figure import check_drawable
from kvhive.scripts.bench_transfer_channel import Cell, Placed
from kvhive.scripts.bench_transfer_choice import QUICK, Grid
from kvhive.scripts.progress import show_progress

KIB, MIB = 2**10, 2**20
CELLS = [
    Cell(block_bytes, chain_bytes, placed)
    for block_bytes in (16 * KIB, 360 * KIB, 720 * KIB, 2 * MIB)
    for placed in Placed
    for chain_bytes in (4 * MIB, 16 * MIB, 64 * MIB)
]
"""Blocks of a toy model, of the demo model in 16 and in 32 bits, and of 8 billion parameters in 16 bits."""
QUICK_CELLS = [Cell(512 * KIB, 4 * MIB)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    rounds: int
    quick: bool
    """Few cells, to see that all of it runs; the figures mean little."""
    grid: bool


def run(plan: Plan, png: Path | None, as_json: bool) -> None:
    """Measure, print, draw. Raises KvhiveError."""
    if png is not None:
        check_drawable()
    with show_progress(sys.stderr) as progress:
        progress("bench", "chains beside plain send and recv")
        channel = bench_transfer_channel.measure(QUICK_CELLS if plan.quick else CELLS, plan.rounds)
        choice = bench_transfer_choice.measure(QUICK if plan.quick else Grid(), progress) if plan.grid else {}
    least = {
        placed: min((cell["transfer_ratio"] for cell in channel if cell["placed"] == placed), default=None)
        for placed in Placed
    }
    result: dict[str, Any] = {
        "transfer_ratio": least[Placed.ROW],
        "used_transfer_ratio": least[Placed.USED],
        "scattered_transfer_ratio": least[Placed.SCATTERED],
        "channel": channel,
        **choice,
    }
    if png is not None and choice:
        from kvhive.scripts.bench_transfer_figure import draw

        draw(png, choice)
    click.echo(json.dumps(result) if as_json else "\n".join(_lines(result)))


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [
        "block KiB  placed     chain MiB  plain GB/s  chain GB/s  over gloo  "
        "ratio  same job  of the best times"
    ]
    lines += [
        f"{cell['block_bytes'] / KIB:9.0f}  {cell['placed']:9}  "
        f"{cell['chain_bytes'] / MIB:9.0f}  {cell['plain_gb_s']:10.2f}  "
        f"{cell['chain_gb_s']:10.2f}  {cell['gloo_gb_s']:9.2f}  "
        f"{cell['transfer_ratio']:5.2f}  {cell['same_job_ratio']:8.2f}  {cell['best_ratio']:17.2f}"
        for cell in result["channel"]
    ]
    if "grid" not in result:
        return lines
    lines += ["", "    MB/s  context  missing  pull ms  compute ms  chose"]
    for cell in result["grid"]:
        chose = "pull" if cell["chose_pull"] else "compute"
        verdict = "tie" if cell["tied"] else ("right" if cell["right"] else "WRONG")
        lines.append(
            f"{cell['bytes_per_s'] / 1e6:8.0f}  {cell['context']:7d}  {cell['missing']:7d}  "
            f"{1e3 * cell['pull_s']:7.1f}  {1e3 * cell['compute_s']:10.1f}  {chose} ({verdict})"
        )
    right, strictly = result["choice_right_ratio"], result["choice_strictly_right_ratio"]
    return [*lines, "", f"right in {100 * right:.0f} % of the cells, {100 * strictly:.0f} % without the ties"]
