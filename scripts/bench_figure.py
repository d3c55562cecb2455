"""A measurement's ratios as bars in a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvhive.proto.errors import ConfigError
from kvhive.scripts.bench_report import Summary

_PANELS = (("output_tok_s", "output tok/s"), ("ttft_p50_ms", "TTFT p50"), ("ttft_p99_ms", "TTFT p99"))


def check_drawable() -> None:
    """Raise ConfigError where matplotlib is missing: before anything is measured for a figure."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--png needs matplotlib: pip install 'kvhive[bench]'") from error


def draw(path: Path, ratios: Summary, first: str, others: Sequence[str]) -> None:
    """Write one panel per metric, one group of bars per workload. Raises ConfigError, OSError."""
    check_drawable()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(_PANELS), 3.6), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), squeeze=False)[0]
    width = 0.8 / len(others)
    for axes, (metric, title) in zip(panels, _PANELS, strict=True):
        for place, other in enumerate(others):
            values = [targets[other][metric] for targets in ratios.values()]
            left = [group + (place - (len(others) - 1) / 2) * width for group in range(len(values))]
            bars = axes.bar(left, [value or 0.0 for value in values], width, label=other)
            labels = ["-" if value is None else f"{value:.2f}" for value in values]
            axes.bar_label(bars, labels, fontsize=7)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(ratios)), list(ratios))
        axes.set_title(title)
    panels[0].set_ylabel(f"{first} beside the others (above 1: better)")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8)
    figure.savefig(path, format="png", dpi=150)
