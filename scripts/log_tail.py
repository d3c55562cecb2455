"""The last words of a process that died, for a one-line error."""

from __future__ import annotations

import os
from pathlib import Path

_TAIL_BYTES = 8192
_WIDTH = 300


def last_line(log: Path) -> str:
    """Return the last line of a log that says something, cut to a readable width."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read().decode(errors="replace")
    except OSError:
        return f"{log} cannot be read"
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[-1][:_WIDTH] if lines else "it left no log"
