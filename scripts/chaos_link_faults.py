"""The faults of a chaos run without Ray: also of links, where there is a network of its own."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from kvhive.scripts.chaos_cluster import ChaosCluster
from kvhive.scripts.chaos_faults import Fault, Faults
from kvhive.scripts.chaos_trouble import Trouble
from kvhive.scripts.chaos_victims import Worker


class LinkFaults(Faults):
    """Strikes a cluster of plain processes."""

    def __init__(self, cluster: ChaosCluster, trouble: Trouble, seed: str) -> None:
        super().__init__(cluster, trouble, seed)
        self._bare = cluster
        if cluster.network is not None:
            self.kinds.append(Fault("link_cut", 4, lambda: self._at_worker(self._cut_link)))
            self.kinds.append(Fault("link_slow", 2, lambda: self._at_worker(self._slow_link)))

    async def _cut_link(self, worker: Worker) -> None:
        network, place = self._bare.network, self._bare.places[worker.worker_id]
        assert network is not None
        others = [p.address for w, p in self._bare.places.items() if w != worker.worker_id]
        servers = self._bare.redis.addresses
        everybody = [network.host, *servers, *others]
        to = self._chance.choice(([network.host], servers, others, [self._chance.choice(others)], everybody))
        with self._mended(worker, "link_cut"):
            await asyncio.to_thread(network.cut, place, to)
            await asyncio.sleep(self._freeze_s())

    async def _slow_link(self, worker: Worker) -> None:
        network, place = self._bare.network, self._bare.places[worker.worker_id]
        assert network is not None
        with self._mended(worker, "link_slow"):
            await asyncio.to_thread(network.slow, place, self._chance.choice((64, 256, 1024)))
            await asyncio.sleep(self._freeze_s())

    @contextlib.contextmanager
    def _mended(self, worker: Worker, fault: str) -> Any:
        assert self._bare.network is not None
        with self._trouble.striking(fault, worker.worker_id):
            try:
                yield
            finally:
                self._bare.network.mend(self._bare.places[worker.worker_id])
