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
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            gc.collect()
        if not frozen:  # else somebody wants it so
            gc.unfreeze()
