"""A simulation's policies side by side, as bars in a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvhive.scripts.bench_figure import check_drawable
from kvhive.scripts.sim_report import PolicyReport

_PANELS = (
    ("token_hit_rate", "prompt tokens found in the cache", "{:.0%}"),
    ("ttft_mean_s", "TTFT mean, s", "{:.2f}"),
    ("ttft_p99_s", "TTFT p99, s", "{:.2f}"),
)


def draw(path: Path, reports: Sequence[PolicyReport], title: str) -> None:
    """Write one panel per metric, a bar per policy, the limits as lines. Raises ConfigError, OSError."""
    check_drawable()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(_PANELS), 0.8 + 0.4 * len(reports)), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), squeeze=False, sharey=True)[0]
    ordered = sorted(reports, key=lambda row: -row.ttft_mean_s)
    names = [each.policy for each in ordered]
    for axes, (metric, label, form) in zip(panels, _PANELS, strict=True):
        values = [getattr(each, metric) for each in ordered]
        colours = ["tab:orange" if name == "kv_aware" else "tab:blue" for name in names]
        bars = axes.barh(names, values, color=colours)
        axes.bar_label(bars, [form.format(value) for value in values], fontsize=8, padding=2)
        axes.set_title(label)
        axes.margins(x=0.15)
    first = reports[0]
    panels[0].axvline(first.belady_hit_rate, color="black", linewidth=0.8, label="Belady")
    panels[0].axvline(first.infinite_hit_rate, color="grey", linewidth=0.8, linestyle=":", label="infinite")
    panels[0].legend(fontsize=7, loc="lower left")
    panels[1].axvline(first.pooled_ttft_mean_s, color="black", linewidth=0.8, label="pooled")
    panels[2].axvline(first.pooled_ttft_p99_s, color="black", linewidth=0.8, label="pooled")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, format="png", dpi=150)
