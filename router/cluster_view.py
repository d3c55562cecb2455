"""The cluster as this router sees it, for GetCluster and `kvhive status`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvhive.proto.index_schema import WorkerRecord
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.kv_index import KvIndex
from kvhive.router.kv_index_reader import KvIndexReader
from kvhive.router.pull_cost import crossover_blocks
from kvhive.router.routing_policy import Speed
from kvhive.router.worker_registry import WorkerRegistry, WorkerView

CONNECTED_WITHIN_S = 2.0
"""An index heard of this lately counts as connected; in peace it is heard of ten times a second."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Describes one cluster. Cheap enough to be asked several times a second."""

    cluster: str
    model: str
    version: str
    registry: WorkerRegistry
    index: KvIndex
    reader: KvIndexReader
    clock: Callable[[], float]

    def describe(self) -> pb.GetClusterResponse:
        """Return everything that is known now."""
        routable = {view.record.worker_id for view in self.registry.routable(self.clock())}
        staleness_s = self.index.staleness_s()
        return pb.GetClusterResponse(
            cluster=self.cluster,
            model=self.model,
            version=self.version,
            workers=[
                _worker(view, self.index, view.record.worker_id in routable) for view in self.registry.views()
            ],
            index=pb.IndexInfo(
                staleness_s=staleness_s,
                blocks=self.index.total_blocks(),
                resyncs=self.reader.counters.resyncs,
                connected=staleness_s < CONNECTED_WITHIN_S,
            ),
        )


def _worker(view: WorkerView, index: KvIndex, routable: bool) -> pb.WorkerInfo:
    record, load = view.record, view.record.load
    return pb.WorkerInfo(
        id=record.worker_id,
        state=record.state.value,
        epoch=record.epoch,
        address=record.address,
        device=record.device,
        pid=record.pid,
        blocks=pb.Blocks(
            total=load.blocks_total,
            live=load.blocks_live,
            cached=load.blocks_cached,
            free=load.blocks_free,
            pinned=load.blocks_pinned,
        ),
        running=load.running,
        waiting=load.waiting,
        queued_prefill_tokens=load.queued_prefill_tokens,
        prefix_query_tokens=load.prefix_queries,
        prefix_hit_tokens=load.prefix_hits,
        preemptions=load.preemptions,
        indexed_blocks=index.block_count(record.worker_id),
        routable=routable,
        drafted_tokens=load.drafted_tokens,
        accepted_tokens=load.accepted_tokens,
        pulled_tokens=load.pulled_tokens,
        pulls=load.pulls,
        pull_fallbacks=load.pull_fallbacks,
        pull_latency_s=load.pull_latency_s,
        pull_bytes_per_s=load.pull_bytes_per_s,
        pull_crossover_blocks=_crossover(record),
    )


def _crossover(record: WorkerRecord) -> int:
    load, size = record.load, record.block_size
    speed = Speed(load.step_base_s, load.step_per_token_s, load.step_per_attention_s, load.max_step_tokens)
    return crossover_blocks(
        load.block_bytes,
        load.pull_latency_s,
        load.pull_bytes_per_s,
        lambda blocks: speed.prefill_s(blocks * size),
        max(1, record.max_context // size),
    )
