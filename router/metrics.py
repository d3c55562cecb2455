"""What the router counts, for Prometheus: a Frontend around a Frontend, which knows nothing of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvhive.proto.errors import KvhiveError, NotNow, TimedOut
from kvhive.router.frontend import (
    Delta,
    Finished,
    GenerationEvent,
    ModelInfo,
    Started,
    TokenizingFrontend,
    TokenPiece,
    Usage,
)
from kvhive.router.request import GenerateRequest, Prompt
from kvhive.router.routing_policy import RouteReason

Metric = TypeVar("Metric", Counter, Histogram)

_RATIO_BUCKETS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 3, 5, 10)
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class _Labelled(Generic[Metric]):
    """A metric's children by their labels: the library checks each label of each call, which takes longer."""

    def __init__(self, metric: Metric) -> None:
        self._metric: Metric = metric
        self._children: dict[tuple[str, ...], Metric] = {}

    def labels(self, *values: str) -> Metric:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(*values)
        return child


class RequestMetrics:
    """The counters, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.started = self._counter("requests_started", "Requests sent to a first worker", "worker")
        self.failed = self._counter("requests_failed", "Requests that ended in an error", "error")
        self.finished = self._counter("requests_finished", "Requests that ended well", "worker", "reason")
        self.routed = self._counter(
            "requests_routed", "Finished requests by why their worker was chosen", "reason"
        )
        self.refused = self._counter(
            "requests_refused", "Requests that ended in an error that may be retried, by why", "cause"
        )
        self.timeouts = self._counter(
            "timeouts", "Requests that ended because a time was over, by which", "cause"
        )
        self.tokens = self._counter("tokens", "Tokens of finished requests", "kind")
        self.pins = self._counter(
            "pins", "Breakpoints of finished requests: kept, or why they are not", "outcome"
        )
        ttft = Histogram(
            "kvhive_ttft_seconds",
            "Seconds from arrival to the first token",
            ["cache"],
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.ttft = _Labelled(ttft)
        self.ttft_ratio = Histogram(
            "kvhive_ttft_ratio",
            "Predicted time to the first token over the true one: 1 is right, more is too cautious",
            buckets=_RATIO_BUCKETS,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> _Labelled[Counter]:
        return _Labelled(Counter(f"kvhive_{name}", text, labels, registry=self.registry))

    def count(self, usage: Usage, reason: str, ttft_s: float) -> None:
        """Count a request that ended well, by how its last choice ended. Once, whatever was retried."""
        self.finished.labels(usage.worker_id, reason).inc()
        self.routed.labels(usage.route_reason).inc()
        self.tokens.labels("prompt").inc(usage.prompt_tokens)
        self.tokens.labels("cached").inc(usage.cached_tokens)
        self.tokens.labels("pulled").inc(usage.pulled_tokens)
        self.tokens.labels("completion").inc(usage.completion_tokens)
        self.tokens.labels("drafted").inc(usage.drafted_tokens)
        self.tokens.labels("accepted").inc(usage.accepted_tokens)
        if usage.route_reason == RouteReason.REPLICA:
            self.tokens.labels("replicated").inc(max(0, usage.reachable_tokens - usage.cached_tokens))
        self.count_pins(usage)
        self.ttft.labels("hit" if usage.cached_tokens else "miss").observe(ttft_s)

    def count_pins(self, usage: Usage) -> None:
        """Count what was to be kept, by what became of it."""
        for prefix in usage.kept:
            self.pins.labels(prefix.not_kept or "kept").inc()

    def timed_out(self, cause: str) -> None:
        """Count something whose time was over."""
        self.timeouts.labels(cause).inc()

    def judge(self, predicted_s: float, placed_at: float, now: float) -> None:
        """Set what was predicted when a request was placed beside what came true."""
        if predicted_s > 0.0 and now > placed_at:
            self.ttft_ratio.observe(predicted_s / (now - placed_at))


class MeteredFrontend:
    """Counts what passes through an inner Frontend. See Frontend."""

    def __init__(
        self, inner: TokenizingFrontend, metrics: RequestMetrics, clock: Callable[[], float]
    ) -> None:
        self._inner = inner
        self._metrics = metrics
        self._clock = clock

    def models(self) -> list[ModelInfo]:
        """See Frontend."""
        return self._inner.models()

    def token_piece(self, token_id: int) -> TokenPiece:
        """See Frontend."""
        return self._inner.token_piece(token_id)

    def ready(self) -> bool:
        """See Frontend."""
        return self._inner.ready()

    async def tokenize(self, prompt: Prompt, model: str = "", cache_salt: str = "") -> list[int]:
        """See TokenizingFrontend."""
        return await self._inner.tokenize(prompt, model, cache_salt)

    async def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """See TokenizingFrontend."""
        return await self._inner.detokenize(token_ids, model)

    async def prewarm(self, request: GenerateRequest, workers: int) -> list[Usage]:
        """See TokenizingFrontend."""
        usages = await self._inner.prewarm(request, workers)
        for usage in usages:
            self._metrics.count_pins(usage)
        return usages

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See Frontend."""
        arrived, ttft_s, predicted = self._clock(), 0.0, (0.0, 0.0)
        try:
            async with aclosing(self._inner.generate(request)) as events:
                async for event in events:
                    match event:
                        case Started():
                            self._metrics.started.labels(event.worker_id).inc()
                            predicted = event.predicted_ttft_s, self._clock()
                        case Delta() if event.token_ids and not ttft_s:
                            ttft_s = self._clock() - arrived
                            self._metrics.judge(*predicted, self._clock())
                        case Finished(reason, usage) if usage is not None:
                            self._metrics.count(usage, reason, ttft_s)
                    yield event
        except KvhiveError as error:
            self._metrics.failed.labels(type(error).__name__).inc()
            if isinstance(error, NotNow):
                cause = error.cause or "other"
                if isinstance(error, TimedOut):
                    self._metrics.timed_out(cause)
                else:
                    self._metrics.refused.labels(cause).inc()
            raise
