"""A controller on actors that are told what to say, and that outlive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker_records import Clock, record

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.errors import Unavailable
from kvhive.proto.index_schema import LoadReport, WorkerRecord, WorkerState
from kvhive.router.worker_registry import WorkerView
from kvhive.scripts.controller import Controller, Surroundings
from kvhive.scripts.fleet_actors import ActorView
from kvhive.scripts.fleet_memory import FleetMemory


@dataclass
class Ray:
    """Actors as a test wants them; they outlive every controller."""

    views: dict[str, ActorView] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    warm_s: dict[str, float] = field(default_factory=dict)
    first: ActorView = field(default_factory=lambda: ActorView("serving", "serving", "node"))

    def create(self, worker_id: str, warm_s: float) -> None:
        assert worker_id not in self.views, "doubled"
        self.views[worker_id] = self.first
        self.warm_s[worker_id] = warm_s

    def poll(self) -> dict[str, ActorView]:
        return dict(self.views)

    def end(self, worker_id: str, grace_s: float) -> None:
        self.ended.append(worker_id)
        self.views.pop(worker_id, None)


class Calls:
    """Workers that do as they are told, or say nothing."""

    def __init__(self) -> None:
        self.told: list[tuple[str, WorkerState]] = []
        self.open = 0
        self.gave: list[str] = []

    async def set_state(self, worker: WorkerRecord, state: WorkerState) -> int:
        self.told.append((worker.worker_id, state))
        return self.open

    async def retain(self, addresses: set[str]) -> None:
        self.kept = addresses

    async def hot_chains(self, worker: WorkerRecord, chains: int, blocks: int) -> list[Any]:
        self.gave.append(worker.worker_id)
        raise Unavailable("blocks do not move here")


class NoIndex:
    async def held(self, worker: WorkerRecord, chains: Sequence[Sequence[BlockKey]]) -> set[BlockKey]:
        return set()


class Rig:
    """A controller, and another one after it, on the same Ray, Redis and memory."""

    def __init__(self, folder: Path, wanted: int = 2, warm_s: float = 0.0, policy: Any = None) -> None:
        self.folder, self.ray, self.calls, self.clock = folder, Ray(), Calls(), Clock()
        self.records: dict[str, WorkerRecord] = {}
        self.leaving: set[str] = set()
        self.lease_s = 0.0
        self._warm_s, self._policy = warm_s, policy
        FleetMemory(str(folder), wanted, "cpu", "float32").save()
        self.controller = self.another()

    def another(self) -> Controller:
        memory = FleetMemory.load(self.folder)
        assert memory is not None
        around = Surroundings(
            actors=self.ray,
            leaving_nodes=lambda: self.leaving,
            workers=lambda: [WorkerView(r, self.clock()) for r in self.records.values()],
            calls=self.calls,  # type: ignore[arg-type]
            index=NoIndex(),
            free=lambda: "1 CPU",
            clock=self.clock,
            lease_s=self.lease_s,
        )
        return Controller(memory, around, self._warm_s, self._policy)

    async def step(self) -> set[str]:
        """Let the controller act once; the workers that there are then."""
        await self.controller.step()
        return set(self.ray.views)

    def registers(self, worker_id: str, hits: int = 0, **changes: Any) -> None:
        load = LoadReport(blocks_total=8, blocks_free=8, prefix_hits=hits, step_per_token_s=0.001)
        self.records[worker_id] = replace(record(worker_id, load=load), **changes)
