"""What the router counts, for Prometheus. One object per process, on a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvhive.router.frontend import Usage

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class RequestMetrics:
    """Counters of requests and tokens, by outcome and by worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._routed = self._counter("requests_routed", "Requests sent to a worker", "worker", "reason")
        self._refused = self._counter("requests_refused", "Requests refused by the router", "cause")
        self._finished = self._counter("requests_finished", "Requests that ended well", "reason")
        self._failovers = self._counter("failovers", "Streams that lost a worker", "worker")
        self._tokens = self._counter("tokens", "Tokens of finished requests", "kind")
        self._ttft = Histogram(
            "kvhive_ttft_seconds",
            "Seconds from arrival to the first token",
            ["cache"],
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvhive_{name}", text, labels, registry=self.registry)

    def routed(self, worker_id: str, reason: str) -> None:
        """A request was sent to a worker."""
        self._routed.labels(worker_id, reason).inc()

    def refused(self, cause: str) -> None:
        """A request was refused before it was routed."""
        self._refused.labels(cause).inc()

    def failed_over(self, worker_id: str) -> None:
        """A stream lost this worker."""
        self._failovers.labels(worker_id).inc()

    def first_token(self, seconds: float, hit: bool) -> None:
        """A first token arrived."""
        self._ttft.labels("hit" if hit else "miss").observe(seconds)

    def finished(self, usage: Usage, reason: str) -> None:
        """A request ended well. Cached tokens are counted here, once per request, whatever was retried."""
        self._finished.labels(reason).inc()
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("cached").inc(usage.cached_tokens)
        self._tokens.labels("completion").inc(usage.completion_tokens)
