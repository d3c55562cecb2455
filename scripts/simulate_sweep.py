"""Many simulations: every trace at every pool size and pace under every policy, and who loses where.

    python -m kvhive.scripts.simulate_sweep FILE TRACE ...      one JSON line per simulation, appended to FILE
    python -m kvhive.scripts.simulate_sweep FILE --summary      ours beside the best other policy of each cell

What stands in FILE already is not run again, so a sweep can be stopped and continued; `--redo kv_aware`
runs one policy again, and the later line counts.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import click

from kvhive.proto.errors import ConfigError, KvhiveError
from kvhive.scripts.progress import show_progress
from kvhive.scripts.sim_options import SimulateOptions
from kvhive.scripts.sim_report import Goal
from kvhive.scripts.simulate import Study, lay_out, parse_policies, run_policy
from kvhive.scripts.trace_format import Trace
from kvhive.scripts.trace_reader import read_trace

OURS = "kv_aware"
SHARES = (0.25, 0.5, 1.0)
"""Pools, as shares of the trace's distinct blocks over the number of workers ..."""

POOL_TOKENS = 500_000
"""... and of this size."""

LOADS = (0.0, 0.9)
"""The native rate, and this share of the prefill capacity."""

POLITE = 10
"""Added to the niceness: a sweep takes an hour of one core."""

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace, pool size and pace. A share of 0: a pool of POOL_TOKENS; a load of 0: the native rate."""

    trace: str
    share: float
    load: float

    def options(self, given: SimulateOptions) -> SimulateOptions:
        """The options of this cell."""
        if self.share:
            return replace(given, capacity_share=self.share, load=self.load)
        return replace(given, capacity_tokens=POOL_TOKENS, load=self.load)

    def __str__(self) -> str:
        pool = f"{self.share:.0%}" if self.share else f"{POOL_TOKENS / 1e6:g} M"
        return f"{self.trace} pool {pool} {f'load {self.load:g}' if self.load else 'native'}"


def cells_of(trace: str) -> list[Cell]:
    """All cells of a trace."""
    return [Cell(trace, share, load) for share in (*SHARES, 0.0) for load in LOADS]


def read_rows(path: Path) -> dict[tuple[Cell, str], Row]:
    """What has been simulated; the last line of each cell and policy. Raises ConfigError."""
    rows: dict[tuple[Cell, str], Row] = {}
    if not path.exists():
        return rows
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            rows[Cell(row["trace"], row["share"], row["load"]), row["policy"]] = row
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path.name}:{number}: not a line of a sweep: {error!r}") from error
    return rows


def run(
    path: Path, traces: Sequence[Path], policies: Sequence[str], redo: str, given: SimulateOptions
) -> None:
    """Simulate what is missing. Raises KvhiveError, OSError."""
    done = {key for key in read_rows(path) if key[1] != redo}
    with show_progress(sys.stderr) as tell, path.open("a") as lines:
        for file in traces:
            trace = read_trace(file, given.limit)
            for cell in cells_of(trace.name):
                missing = [policy for policy in policies if (cell, policy) not in done]
                if not missing:
                    continue
                study = lay_out(trace, _coarse(trace, cell.options(given)))
                for policy in missing:
                    tell(str(cell), policy)
                    lines.write(json.dumps(_simulate(cell, study, policy, given)) + "\n")
                    lines.flush()


def _coarse(trace: Trace, options: SimulateOptions) -> SimulateOptions:
    """Blocks as large as asked for, if the trace's are."""
    return replace(options, block_size=min(options.block_size, trace.block_size))


def _simulate(cell: Cell, study: Study, policy: str, given: SimulateOptions) -> Row:
    numbers, decision_s = run_policy(
        study, policy, Goal(given.slo_ttft_s, given.slo_tpot_s), lambda subject, text: None
    )
    return {
        "trace": cell.trace,
        "share": cell.share,
        "load": cell.load,
        "block_size": study.fleet.block_size,
        "decision_us": round(decision_s * 1e6, 1),
        **numbers.to_json(),
    }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours beside the others in one cell."""

    cell: Cell
    mean: float
    """Our mean TTFT over that of the best other policy."""
    best_mean: str
    p99: float
    best_p99: str
    hit_gap: float
    """Hit rate of the best other policy that is no slower than ours, less ours."""


def compare(rows: Mapping[tuple[Cell, str], Row]) -> list[Comparison]:
    """All cells that were run under our policy and others."""
    found = []
    for cell in dict.fromkeys(cell for cell, _ in rows):
        ours = rows.get((cell, OURS))
        others = [row for (where, name), row in rows.items() if where == cell and name != OURS]
        if ours is None or not others:
            continue
        mean = min(others, key=lambda row: row["ttft_mean_s"])
        p99 = min(others, key=lambda row: row["ttft_p99_s"])
        no_slower = [row for row in others if row["ttft_mean_s"] <= ours["ttft_mean_s"]]
        hits = max((row["token_hit_rate"] for row in no_slower), default=ours["token_hit_rate"])
        found.append(
            Comparison(
                cell,
                ours["ttft_mean_s"] / mean["ttft_mean_s"],
                mean["policy"],
                ours["ttft_p99_s"] / p99["ttft_p99_s"],
                p99["policy"],
                hits - ours["token_hit_rate"],
            )
        )
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers; 1 of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0


def summary(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Lines for a person: each cell, then all."""
    yield f"{'cell':<46}{'mean':>6}  {'best':<18}{'p99':>6}  {'best':<18}{'hit gap':>8}"
    for each in comparisons:
        yield (
            f"{each.cell!s:<46}{each.mean:>6.2f}  {each.best_mean:<18}{each.p99:>6.2f}  {each.best_p99:<18}"
            f"{each.hit_gap:>8.1%}"
        )
    if comparisons:
        for name in ("mean", "p99"):
            ratios = [getattr(each, name) for each in comparisons]
            worst = max(comparisons, key=lambda each: float(getattr(each, name)))
            yield (
                f"TTFT {name}: geometric mean {geometric_mean(ratios):.3f} of the best policy's, "
                f"worst {max(ratios):.2f} in {worst.cell}"
            )
        yield f"hit rate: worst gap {max(each.hit_gap for each in comparisons):.1%}"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("traces", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--policy", "policies", default="all", show_default=True, help="Which, with commas between.")
@click.option("--redo", default="", help="A policy to run again.")
@click.option("--workers", type=click.IntRange(1, 4096), default=8, show_default=True, help="How many.")
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Larger is faster.")
@click.option("--limit", type=click.IntRange(0), default=0, help="Only the first requests; 0: all.")
@click.option("--index-lag", type=click.FloatRange(0, 3600), default=0.0, help="Seconds.")
@click.option("--summary", "only_summary", is_flag=True, help="Run nothing.")
def main(
    file: Path, traces: tuple[Path, ...], policies: str, redo: str, only_summary: bool, **options: Any
) -> None:
    """Run what is missing in FILE, and compare."""
    try:
        if not only_summary:
            os.nice(POLITE)
            given = SimulateOptions(
                workers=options["workers"],
                block_size=options["block_size"],
                limit=options["limit"],
                index_lag_s=options["index_lag"],
            )
            run(file, traces, parse_policies(policies), redo, given)
        click.echo("\n".join(summary(compare(read_rows(file)))))
    except KvhiveError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
