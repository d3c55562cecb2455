"""What pulls take at each worker, for Prometheus: read from what the workers report, when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvhive.proto.v1 import inference_pb2 as pb


class PullMetrics(Collector):
    """Gauges by worker. A worker that has measured nothing, or nothing lately, has none."""

    def __init__(self, describe: Callable[[], pb.GetClusterResponse]) -> None:
        self._describe = describe

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        rate = _gauge("pull_bytes_per_second", "Measured rate of blocks that are pulled to a worker")
        latency = _gauge("pull_latency_seconds", "Measured seconds of a pull whatever its size")
        crossover = _gauge("pull_crossover_blocks", "Missing blocks from which on a pull is faster; 0: never")
        for worker in self._describe().workers:
            if worker.pull_bytes_per_s > 0:
                rate.add_metric([worker.id], worker.pull_bytes_per_s)
                latency.add_metric([worker.id], worker.pull_latency_s)
                crossover.add_metric([worker.id], worker.pull_crossover_blocks)
        return rate, latency, crossover

    def describe(self) -> Iterable[Metric]:
        """Name them without asking anybody: that is for when one registers."""
        return ()


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvhive_{name}", text, labels=["worker"])
