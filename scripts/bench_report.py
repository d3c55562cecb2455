"""What a measurement says: medians, ratios to the first target, as a table and as one JSON document."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvhive.scripts.bench_run import METRICS, Plan, RunResult, Target, median
from kvhive.scripts.bench_workloads import workload

HIGHER_IS_BETTER = {"output_tok_s", "total_tok_s"}
COMPARED = METRICS[:-1]
"""Metrics that have a ratio: cached tokens explain, they are no merit of their own."""
_HEADS = {
    "output_tok_s": "out tok/s",
    "total_tok_s": "all tok/s",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "gap_p50_ms": "gap p50",
    "gap_p99_ms": "gap p99",
    "cached_tokens": "cached",
}

Figures = dict[str, float | None]
"""By metric; None where nothing was measured."""
Summary = dict[str, dict[str, Figures]]
"""By workload and target."""


def medians(results: Sequence[RunResult]) -> Summary:
    """Return the median of each figure over a target's runs."""
    found: Summary = {}
    for (name, target), runs in _grouped(results).items():
        figures = [run.metrics() for run in runs]
        found.setdefault(name, {})[target] = {m: median([f[m] for f in figures]) for m in METRICS}
    return found


def ratios(results: Sequence[RunResult], first: str) -> Summary:
    """Return how the first target does beside each other one: the median over runs, each against its own.

    First / other for throughput, other / first for times: above 1 the first one is better.
    """
    groups, found = _grouped(results), Summary()
    for (name, target), runs in groups.items():
        if target == first:
            continue
        pairs = [(a.metrics(), b.metrics()) for a, b in zip(groups[name, first], runs, strict=True)]
        figures = {m: median([_ratio(m, ours[m], theirs[m]) for ours, theirs in pairs]) for m in COMPARED}
        found.setdefault(name, {})[target] = figures
    return found


def table(results: Sequence[RunResult], targets: Sequence[Target], plan: Plan) -> list[str]:
    """Return medians and ratios as lines for people."""
    first, middle = targets[0].name, medians(results)
    beside = ratios(results, first)
    wide = max(len(target.name) for target in targets) + len(f"{first} / ")
    lines = [f"medians of {plan.runs} runs; times in ms; ratios above 1: {first} is better"]
    for name in plan.workloads:
        work = workload(name, plan.seed, plan.ids)
        lines += ["", f"({name}) {work.title}"]
        lines.append(" " * wide + "".join(f"{head:>11}" for head in _HEADS.values()) + f"{'failed':>8}")
        for target in targets:
            cells = [_cell(middle[name][target.name][metric], 1) for metric in METRICS]
            failed = sum(r.failures for r in results if (r.workload, r.target) == (name, target.name))
            lines.append(f"{target.name:<{wide}}" + "".join(f"{cell:>11}" for cell in cells) + f"{failed:>8}")
        for target in targets[1:]:
            cells = [_cell(beside[name][target.name][metric], 2) for metric in COMPARED]
            label = f"{first} / {target.name}"
            lines.append(f"{label:<{wide}}" + "".join(f"{cell:>11}" for cell in cells))
    return lines


def run_line(result: RunResult, runs: int) -> str:
    """Return one run as a line of progress."""
    figures = result.metrics()
    throughput, ttft = _cell(figures["output_tok_s"], 1), _cell(figures["ttft_p50_ms"], 0)
    failed = f", {result.failures} FAILED" if result.failures else ""
    return (
        f"run {result.run + 1}/{runs} ({result.workload}) {result.target}: {result.wall_s:.1f} s, "
        f"{throughput} out tok/s, TTFT p50 {ttft} ms{failed}"
    )


def document(
    results: Sequence[RunResult], targets: Sequence[Target], plan: Plan, version: str, when: str
) -> dict[str, Any]:
    """Return everything as plain JSON: raw times of every request, figures, versions, machine, flags."""
    return {
        "kvhive": version,
        "when": when,
        "machine": machine(),
        "plan": asdict(plan),
        "targets": [asdict(target) for target in targets],
        "medians": medians(results),
        "ratios": ratios(results, targets[0].name),
        "runs": [asdict(result) | {"metrics": result.metrics()} for result in results],
    }


def machine() -> dict[str, Any]:
    """Return what the figures depend on of this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _grouped(results: Sequence[RunResult]) -> dict[tuple[str, str], list[RunResult]]:
    """Return (workload, target) -> its runs, in order."""
    groups: dict[tuple[str, str], list[RunResult]] = {}
    for result in results:
        groups.setdefault((result.workload, result.target), []).append(result)
    return groups


def _ratio(metric: str, ours: float | None, theirs: float | None) -> float | None:
    better, worse = (ours, theirs) if metric in HIGHER_IS_BETTER else (theirs, ours)
    return better / worse if better is not None and worse else None


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
