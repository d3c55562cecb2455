"""Small traces with known answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_trace(path: Path, rows: list[dict[str, Any]], block: int = 16, mode: str = "open") -> Path:
    """Write a kvtrace-1 file."""
    header = {"format": "kvtrace-1", "name": path.stem, "block_size": block, "mode": mode, "n": len(rows)}
    path.write_text("\n".join(json.dumps(row) for row in [header, *rows]) + "\n")
    return path


def opened(at: float, prompt: int, runs: list[int], output: int = 4) -> dict[str, Any]:
    """One request of an open trace."""
    return {"t": at, "s": -1, "k": 0, "in": prompt, "out": output, "r": runs}


def turn(session: int, number: int, prompt: int, runs: list[int], think_s: float = 1.0) -> dict[str, Any]:
    """One request of a closed trace."""
    return {"t": float(session), "s": session, "k": number, "th": think_s, "in": prompt, "out": 4, "r": runs}
