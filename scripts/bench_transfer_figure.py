"""Where pulling beats computing, as a picture: one panel per context."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kvhive.scripts.bench_figure import check_drawable


def draw(path: Path, choice: dict[str, Any]) -> None:
    """Write a PNG: each cell's pull time beside its compute time, and what was chosen.

    Raises ConfigError where matplotlib is missing, OSError.
    """
    check_drawable()
    from matplotlib.figure import Figure

    cells = choice["grid"]
    contexts = sorted({cell["context"] for cell in cells})
    rates = sorted({cell["bytes_per_s"] for cell in cells})
    missing = sorted({cell["missing"] for cell in cells})
    figure = Figure(figsize=(3.6 * len(contexts) + 1, 3.6), layout="constrained")
    panels = figure.subplots(1, len(contexts), squeeze=False)[0]
    for axes, context in zip(panels, contexts, strict=True):
        found = {(c["bytes_per_s"], c["missing"]): c for c in cells if c["context"] == context}
        gain = [
            [
                math.log2(found[rate, blocks]["compute_s"] / found[rate, blocks]["pull_s"])
                for blocks in missing
            ]
            for rate in rates
        ]
        image = axes.imshow(gain, cmap="RdBu", vmin=-4, vmax=4, origin="lower", aspect="auto")
        for row, rate in enumerate(rates):
            for column, blocks in enumerate(missing):
                cell = found[rate, blocks]
                mark = "pull" if cell["chose_pull"] else "compute"
                axes.text(column, row, mark, ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(missing)), [str(blocks) for blocks in missing])
        axes.set_yticks(range(len(rates)), [f"{rate / 1e6:g}" for rate in rates])
        axes.set_xlabel("missing blocks")
        axes.set_title(f"after {context} tokens")
    panels[0].set_ylabel("MB/s")
    figure.colorbar(image, ax=list(panels), label="log2 of compute time by pull time (blue: pull faster)")
    figure.savefig(path, format="png", dpi=150)
