"""Who waits because of pins alone, and for how long at most.

Pins are promises, so that somebody needs their blocks does not end them. Who fits only without them waits,
others pass, and room is made: no lease begins or is renewed. Mostly leases end soon. Where they do not, it is
refused, and the router tries it elsewhere: an hour's pin must not keep a request waiting for an hour. Nor may
a caller who sends large prompts all the time end everybody's leases: room is made for a small part of it.
"""

from __future__ import annotations

import math
from itertools import takewhile

from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.sequence import Sequence

MAX_KEPT_OUT_S = 60.0
"""A fifth of the shortest lease that hosted APIs sell, so that a lease in use outlasts it."""
REST = 10
"""So many times as long as room was made, leases are renewed whoever waits."""


class KeptOut:
    """The sequences that pins keep out of one pool. Not thread-safe: the scheduler owns it."""

    def __init__(self, manager: KvCacheManager) -> None:
        self._manager = manager
        self._waiting: dict[Sequence, tuple[float, int]] = {}
        """Since when, and how many tokens it needs room for; whoever has waited longest is first."""
        self._making_since: float | None = None
        self._rests_until = -math.inf

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def note(self, seq: Sequence, num_tokens: int) -> bool:
        """A sequence that needs so much room does not fit: is it because of pins alone?"""
        if not self._manager.kept_out_by_pins(seq, num_tokens):
            self.discard(seq)  # what stands in its way now goes by itself
            return False
        self._waiting.setdefault(seq, (self._manager.clock(), num_tokens))
        return True

    def makes_room(self) -> bool:
        """Whether no lease is to begin or be renewed now. Asked at every step."""
        now, since = self._manager.clock(), self._making_since
        if since is None:
            if self._waiting and now >= self._rests_until:
                self._making_since = now
        elif not self._waiting or now - since >= MAX_KEPT_OUT_S:
            self._making_since = None
            self._rests_until = now + REST * min(now - since, MAX_KEPT_OUT_S)
        return self._making_since is not None

    def discard(self, seq: Sequence) -> None:
        """It runs, has gone, or waits for others than pins."""
        self._waiting.pop(seq, None)

    def overdue(self) -> list[Sequence]:
        """Return those that pins have kept out for too long, and still do."""
        before = self._manager.clock() - MAX_KEPT_OUT_S
        old = takewhile(lambda each: each[1][0] <= before, self._waiting.items())
        return [seq for seq, (_, num_tokens) in old if self._manager.kept_out_by_pins(seq, num_tokens)]
