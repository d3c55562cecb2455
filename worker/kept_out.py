"""Who waits because of pins alone, and for how long at most.

Pins are promises, so that somebody needs their blocks does not end them. Who fits only without them waits,
others pass, and no lease begins or is renewed meanwhile; mostly leases end soon. Where they do not, it is
refused, and the router tries it elsewhere: an hour's pin must not keep a request waiting for an hour, nor all
other leases unrenewed.
"""

from __future__ import annotations

from itertools import takewhile

from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.sequence import Sequence

MAX_KEPT_OUT_S = 60.0
"""A fifth of the shortest lease that hosted APIs sell."""


class KeptOut:
    """The sequences that pins keep out of one pool. Not thread-safe: the scheduler owns it."""

    def __init__(self, manager: KvCacheManager) -> None:
        self._manager = manager
        self._waiting: dict[Sequence, tuple[float, int]] = {}
        """Since when, and how many tokens it needs room for; whoever has waited longest is first."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def note(self, seq: Sequence, num_tokens: int) -> bool:
        """A sequence that needs so much room does not fit: is it because of pins alone?"""
        if not self._manager.kept_out_by_pins(seq, num_tokens):
            return False
        self._waiting.setdefault(seq, (self._manager.clock(), num_tokens))
        return True

    def discard(self, seq: Sequence) -> None:
        """It runs, or has gone."""
        self._waiting.pop(seq, None)

    def overdue(self) -> list[Sequence]:
        """Return those that pins have kept out for too long, and still do."""
        before = self._manager.clock() - MAX_KEPT_OUT_S
        old = takewhile(lambda each: each[1][0] <= before, self._waiting.items())
        return [seq for seq, (_, num_tokens) in old if self._manager.kept_out_by_pins(seq, num_tokens)]
