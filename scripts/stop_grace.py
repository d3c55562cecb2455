"""How long a router that is told to stop lets its streams run: said by a file in the runtime directory.

A signal carries no number. `kvhive down` writes the file before it sends SIGTERM; a bare SIGTERM means the
default.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from kvhive.proto.errors import ClusterError

DEFAULT_GRACE_S = 2.0
LONGEST_GRACE_S = 86_400.0
_FILE = "grace"


def set_grace(runtime_dir: Path, grace_s: float) -> None:
    """Write down the grace of the stop to come. Without a runtime directory there is nobody to read it.

    Raises ClusterError when the directory cannot be written.
    """
    fresh = runtime_dir / f"{_FILE}.new"
    try:
        fresh.write_text(f"{grace_s}\n")
        os.replace(fresh, runtime_dir / _FILE)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ClusterError(f"{runtime_dir}: cannot be written: {error.strerror}") from error


def read_grace(runtime_dir: Path) -> float:
    """Return the grace in seconds: what was written, between 0 and a day, or else the default."""
    try:
        grace_s = float((runtime_dir / _FILE).read_text())
    except (OSError, ValueError):
        return DEFAULT_GRACE_S
    return DEFAULT_GRACE_S if math.isnan(grace_s) else min(max(grace_s, 0.0), LONGEST_GRACE_S)
