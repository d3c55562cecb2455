"""The faults of a chaos run on Ray: those of the parts that there are without it, and of what only Ray has.

    controller, supervisor    killed or frozen; brought back by the supervisor, and by `kvhive up`
    nodes                     lost whole, or their manager alone; another one comes later
    workers                   drained by hand, and as many wanted again

What Ray starts again takes seconds, so there are fewer of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any

from kvhive.proto.errors import ClusterError
from kvhive.scripts.chaos_faults import LONGEST_ABSENCE_S, Doing, Fault, Faults
from kvhive.scripts.chaos_ray_cluster import RayCluster, SupervisedPart
from kvhive.scripts.chaos_ray_nodes import Node
from kvhive.scripts.chaos_ray_workers import BACK_WITHIN_S, ActorWorker
from kvhive.scripts.chaos_trouble import Trouble
from kvhive.scripts.chaos_victims import Worker

DRAIN_S = 5.0
"""After so long the streams of a drained worker go on elsewhere."""
NODE = "node"
"""One of them at a time is in trouble."""
_ASK_AGAIN_S = 0.5
_DONE_ALREADY = ("is being drained already", "there is no worker")


class RayFaults(Faults):
    """Strikes a cluster on Ray."""

    def __init__(self, cluster: RayCluster, trouble: Trouble, seed: str) -> None:
        super().__init__(cluster, trouble, seed)
        self._ray = cluster
        kinds = {kind.name: kind for kind in self.kinds if kind.name != "worker_restart"}
        kinds["all_workers"] = Fault("all_workers", 0.5, self._at_all_workers)
        self.kinds = [
            *kinds.values(),
            Fault("worker_drain", 2, lambda: self._at_worker(self._drain_worker)),
            Fault("controller_kill", 3, lambda: self._at_part(cluster.controller, self._kill_part)),
            Fault("controller_freeze", 2, lambda: self._at_part(cluster.controller, self._freeze_part)),
            Fault("supervisor_kill", 1.5, lambda: self._at_part(cluster.supervisor, self._kill_supervisor)),
            Fault("node_kill", 2, self._at_node),
            Fault("node_freeze", 1, self._at_raylet),
        ]

    async def _guarded(self, name: str, doing: Doing) -> None:
        await super()._guarded(name, doing)
        with contextlib.suppress(ClusterError):  # the controller is struck: another fault's end asks again
            await asyncio.to_thread(self._ray.refresh)

    # The single parts.

    def _at_part(self, part: SupervisedPart, how: Callable[[SupervisedPart], Doing]) -> Doing | None:
        return None if part.name in self._trouble.struck else how(part)

    async def _kill_part(self, part: SupervisedPart) -> None:
        with self._trouble.striking(f"{part.name}_kill", part.name):
            await asyncio.to_thread(part.end)
            await asyncio.to_thread(part.start)

    async def _freeze_part(self, part: SupervisedPart) -> None:
        with self._trouble.striking(f"{part.name}_freeze", part.name):
            part.signal(signal.SIGSTOP)
            await asyncio.sleep(self._freeze_s())
            part.signal(signal.SIGCONT)

    async def _kill_supervisor(self, part: SupervisedPart) -> None:
        """Kill who would bring the others back; the next `kvhive up` starts another one."""
        with self._trouble.striking("supervisor_kill", part.name):
            await asyncio.to_thread(part.end)
            await asyncio.sleep(self._chance.uniform(0, LONGEST_ABSENCE_S))
            said = await asyncio.to_thread(self._ray.up)
            if "is up again" not in said:
                raise ClusterError(f"`kvhive up` missed no supervisor, and said: {said}")

    # Workers.

    async def _drain_worker(self, worker: Worker) -> None:
        """Retire a worker by hand, whatever becomes of the controller meanwhile, and want as many again."""
        with self._trouble.striking("worker_drain", worker.worker_id):
            order = {"do": "drain", "worker": worker.worker_id, "timeout_s": DRAIN_S, "hand_over": True}
            await asyncio.to_thread(self._insist, order)
            await asyncio.to_thread(self._insist, {"do": "scale", "workers": self._ray.wanted})
            await asyncio.to_thread(self._ray.fleet.wait_whole, worker.worker_id)

    def _insist(self, question: dict[str, Any]) -> None:
        """Ask the controller until it answers; that it knows already is an answer. Raises ClusterError."""
        deadline = time.monotonic() + BACK_WITHIN_S
        while True:
            try:
                self._ray.ask(question)
                return
            except ClusterError as error:
                if any(said in str(error) for said in _DONE_ALREADY):
                    return
                if time.monotonic() > deadline:
                    raise
            time.sleep(_ASK_AGAIN_S)

    # Nodes.

    def _at_node(self) -> Doing | None:
        node = self._chance.choice(self._ray.nodes.nodes)
        victims = self._ray.workers_on(node)
        names = {worker.worker_id for worker in victims}
        left = {worker.worker_id for worker in self._ray.workers} - names - self._trouble.struck
        return self._kill_node(node, victims) if left and NODE not in self._trouble.struck else None

    async def _kill_node(self, node: Node, victims: list[ActorWorker]) -> None:
        names = [worker.worker_id for worker in victims]
        with self._trouble.striking("node_kill", NODE, *names):
            whole = self._chance.random() < 0.5
            await asyncio.to_thread(node.lose if whole else node.lose_raylet)
            await asyncio.sleep(self._chance.uniform(0, LONGEST_ABSENCE_S))
            await asyncio.to_thread(self._ray.nodes.add)
            for worker in victims:
                await asyncio.to_thread(worker.start)

    def _at_raylet(self) -> Doing | None:
        free = NODE not in self._trouble.struck
        return self._freeze_node(self._chance.choice(self._ray.nodes.nodes)) if free else None

    async def _freeze_node(self, node: Node) -> None:
        """Freeze its manager; its workers serve on."""
        with self._trouble.striking("node_freeze", NODE):
            node.signal_raylet(signal.SIGSTOP)
            await asyncio.sleep(self._freeze_s())
            node.signal_raylet(signal.SIGCONT)
