"""A simulation without Python's collector of cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Millions of objects live to a simulation's end: it saves time not to look for cycles among them.

    At the end those are looked at, and not what was there before, which may be as much again.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            gc.collect()
        gc.unfreeze()
