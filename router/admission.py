"""How many requests a router has in flight, whose they are, and when a refused one may come again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvhive.proto.admission import Held, most_places
from kvhive.proto.errors import Overloaded

REMEMBERED_ENDS = 64
"""Of requests: the pace at which places come free is taken from so many."""
UNKNOWN_PACE_S = 1.0
"""Until a place comes free, before any request has ended."""


class Admission:
    """Counts requests in flight by tenant. For the event loop's thread."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        """`limit` is moved a little for some, as proto/admission.py says."""
        self._limit = limit
        self._clock = clock
        self._by_tenant: Counter[str] = Counter()  # no entry is 0
        self._ends: deque[float] = deque(maxlen=REMEMBERED_ENDS)
        self._refused = 0  # since the last end
        self.in_flight = 0

    @contextmanager
    def admitted(self, tenant: str = "", priority: int = 0) -> Iterator[None]:
        """Count a request in flight. Raises Overloaded at the limit."""
        most = most_places(self._limit, priority, self._held_by(tenant))
        if self.in_flight >= most:
            raise Overloaded(
                f"{self.in_flight} requests are in flight, the limit is {most}",
                cause="in_flight",
                retry_after_s=self._next_place_s(),
            )
        self.in_flight += 1
        self._by_tenant[tenant] += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
            self._ends.append(self._clock())
            self._refused = 0

    def _held_by(self, tenant: str) -> Held:
        tenants = len(self._by_tenant) + (tenant not in self._by_tenant)
        return Held(self._by_tenant.get(tenant, 0), tenants, self.in_flight)

    def _next_place_s(self) -> float:
        """Say when a place will be left over by all who were refused since the last one came free."""
        self._refused += 1
        ends = self._ends
        if not ends:
            return UNKNOWN_PACE_S
        pace_s = (self._clock() - ends[0]) / len(ends)
        if len(ends) > 1:  # a pause since then was no slowness
            pace_s = min(pace_s, (ends[-1] - ends[0]) / (len(ends) - 1))
        return self._refused * pace_s
