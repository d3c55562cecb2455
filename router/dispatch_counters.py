"""What a dispatcher counts beside what its events tell, and how Prometheus reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


@dataclass(slots=True)
class DispatchCounters:
    """Since the dispatcher was made."""

    failovers: Counter[str] = field(default_factory=Counter)
    """Streams that moved to another worker, by what had become of theirs."""
    passes: int = 0
    """Requests that were passed on because a worker's queue was full."""
    held: int = 0
    """Requests that had to wait for a worker to serve."""
    first_tokens: int = 0
    """First tokens that came, and requests that were refused or timed out for want of workers."""
    first_tokens_in_goal: int = 0
    """Of those, the ones that came in time."""

    def first_token(self, after_s: float, goal_s: float) -> None:
        """Count a request's first token; infinity for one that will not come."""
        self.first_tokens += 1
        self.first_tokens_in_goal += after_s <= goal_s


class DispatchCollector:
    """Reads the counters, and two gauges, whenever Prometheus asks. See prometheus_client's Collector."""

    def __init__(
        self, counters: DispatchCounters, in_flight: Callable[[], int], held: Callable[[], int]
    ) -> None:
        self._counters = counters
        self._in_flight = in_flight
        self._held = held

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        failovers = CounterMetricFamily(
            "kvhive_failovers",
            "Streams that moved to another worker, by what became of theirs",
            labels=["cause"],
        )
        for cause, count in sorted(self._counters.failovers.items()):
            failovers.add_metric([cause], count)
        yield failovers
        yield CounterMetricFamily(
            "kvhive_requests_passed_on",
            "Requests that went on to another worker because a queue was full",
            value=self._counters.passes,
        )
        yield CounterMetricFamily(
            "kvhive_requests_held",
            "Requests that had to wait for a worker to serve",
            value=self._counters.held,
        )
        yield GaugeMetricFamily("kvhive_requests_in_flight", "Requests in flight", value=self._in_flight())
        yield GaugeMetricFamily(
            "kvhive_requests_waiting_for_worker",
            "Requests that are held because no worker serves",
            value=self._held(),
        )
