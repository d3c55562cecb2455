"""What a router holds at a moment, for who checks from outside that nothing is left behind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvhive.proto.block_hash import keys_digest
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.load_tracker import LoadTracker
from kvhive.router.worker_client import GrpcWorkerClient
from kvhive.router.worker_registry import WorkerRegistry


@dataclass(frozen=True, slots=True)
class RouterAudit:
    """Counts what one router holds. O(blocks), so it is for tests and people, not for monitoring."""

    registry: WorkerRegistry
    mirror: KvIndexMirror
    loads: LoadTracker
    workers: GrpcWorkerClient

    def take(self) -> pb.RouterAudit:
        """Return the state of this moment."""
        audit = pb.RouterAudit(
            tasks=len(asyncio.all_tasks()),
            placed_requests=self.loads.requests(),
            open_requests=self.workers.open_requests(),
        )
        for view in self.registry.views():
            worker_id = view.record.worker_id
            keys = self.mirror.held(worker_id)
            audit.mirror[worker_id].blocks, audit.mirror[worker_id].digest = len(keys), keys_digest(keys)
        return audit
