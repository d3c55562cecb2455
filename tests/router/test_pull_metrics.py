"""What pulls take is told to Prometheus as to `kvhive status`, of those workers that have measured it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.pull_metrics import PullMetrics


def test_every_worker_that_has_measured_its_pulls_has_gauges_and_no_other() -> None:
    workers = [
        pb.WorkerInfo(id="w1", pull_bytes_per_s=5e8, pull_latency_s=0.25, pull_crossover_blocks=7),
        pb.WorkerInfo(id="w2"),
    ]
    registry = CollectorRegistry()
    registry.register(PullMetrics(lambda: pb.GetClusterResponse(workers=workers)))
    lines = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    assert lines == [
        'kvhive_pull_bytes_per_second{worker="w1"} 5e+08',
        'kvhive_pull_latency_seconds{worker="w1"} 0.25',
        'kvhive_pull_crossover_blocks{worker="w1"} 7.0',
    ]
    del workers[0]
    assert [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"] == []
