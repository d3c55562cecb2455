"""How much of a worker each tenant has had: the counters that make sharing fair.

In the spirit of the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024): every tenant has a counter of the tokens computed for it, and whoever has the smallest one goes
first. A tenant that comes back from idleness is lifted to the least active counter, so that nobody saves up
a claim to the whole worker. While two tenants both have requests, their counters therefore differ by no
more than what one request can add.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvhive.proto.admission import Held

PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
"""An output token takes a row of a step of its own, and reads the whole context for it; the paper's ratio."""
MOST_IDLE_TENANTS = 4096
"""Idle tenants whose counters are remembered; of more, those idle the longest are forgotten."""


@dataclass(slots=True)
class _Active:
    served: int
    sequences: int = 0


class FairShare:
    """Counters of one worker. O(1), but for the arrival of an idle tenant: O(active tenants)."""

    def __init__(self) -> None:
        self._active: dict[str, _Active] = {}
        self._idle: OrderedDict[str, int] = OrderedDict()
        self._last_active = 0
        self._sequences = 0

    def held_by(self, tenant: str) -> Held:
        """Say how many sequences a tenant has, of how many, and how many tenants share them."""
        own = self._active.get(tenant)
        places = own.sequences if own else 0
        return Held(places, len(self._active) + (own is None), self._sequences)

    def served(self, tenant: str) -> int:
        """Return the counter of a tenant with sequences, waiting or running."""
        return self._active[tenant].served

    def enter(self, tenant: str) -> None:
        """A sequence of the tenant arrives."""
        if tenant not in self._active:
            least = min((active.served for active in self._active.values()), default=self._last_active)
            self._active[tenant] = _Active(max(least, self._idle.pop(tenant, 0)))
        self._active[tenant].sequences += 1
        self._sequences += 1

    def leave(self, tenant: str) -> None:
        """A sequence of the tenant has ended."""
        active = self._active[tenant]
        active.sequences -= 1
        self._sequences -= 1
        if active.sequences:
            return
        del self._active[tenant]
        self._last_active = active.served
        self._idle[tenant] = active.served
        if len(self._idle) > MOST_IDLE_TENANTS:
            self._idle.popitem(last=False)

    def charge(self, tenant: str, cost: int) -> None:
        """Count what was computed for a tenant with sequences."""
        self._active[tenant].served += cost
