"""A simulation whose workers come and go: they take time to start, and end when their last request has.

A new worker's cache is empty. Fewer workers are wanted: those still starting are given up first, the latest
of them before the others, then of those that serve whoever has least to do and least in its cache. A
draining worker gets nothing new and nothing is moved from it; it is paid for until its streams have ended.
While nobody serves, requests are held, without a bound here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvhive.proto.index_schema import WorkerState
from kvhive.router.autoscaling_signals import RouterCounts
from kvhive.router.routing_policy import RoutingPolicy
from kvhive.router.worker_registry import WorkerView
from kvhive.scripts.sim_run import BlockIds, Fleet, Served, Simulation
from kvhive.scripts.sim_worker import SimulatedWorker
from kvhive.scripts.trace_arrivals import Schedule
from kvhive.scripts.trace_format import Trace


@dataclass(slots=True)
class Life:
    """One worker's."""

    worker: SimulatedWorker
    asked_at: float
    ready_at: float
    ended_at: float = math.inf

    def paid_s(self, until: float) -> float:
        """For how long it was paid."""
        return min(self.ended_at, until) - self.asked_at


@dataclass(slots=True)
class Counts:
    """What the simulated router counts."""

    answered: int = 0
    in_goal: int = 0


class ElasticSimulation(Simulation):
    """`fleet.workers` serve from the beginning; `resize` changes how many. `goal_s`: for the counts alone."""

    def __init__(
        self,
        trace: Trace,
        ids: BlockIds,
        schedule: Schedule,
        fleet: Fleet,
        policy: RoutingPolicy,
        goal_s: float,
    ) -> None:
        super().__init__(trace, ids, schedule, fleet, policy)
        self.goal_s = goal_s
        self.counts = Counts()
        self._held: list[Served] = []
        self._lives = [Life(worker, 0.0, 0.0) for worker in self._workers]
        self._alive = {life.worker.worker_id: life for life in self._lives}

    @property
    def served(self) -> list[Served]:
        """All requests that have arrived, in order."""
        return self._served

    def resize(self, count: int, startup_s: float) -> None:
        """Ask for so many workers, starting and serving ones together."""
        present = [life for life in self._alive.values() if life.worker.state is not WorkerState.DRAINING]
        for _ in range(count - len(present)):
            self._start(startup_s)
        for life in sorted(present, key=_worth)[: max(0, len(present) - count)]:
            self._let_go(life)

    def promote(self) -> None:
        """Let those serve that are ready by now."""
        for life in self._alive.values():
            if life.worker.state is WorkerState.STARTING and life.ready_at <= self.now:
                life.worker.state = WorkerState.SERVING
                self._router.registry.changed()
        if self._held and self._serving():
            held, self._held = self._held, []
            for served in held:
                self._send(served)

    def views(self) -> list[WorkerView]:
        """What a controller sees."""
        return self._router.registry.views(self.now)

    def asked_for(self) -> dict[str, float]:
        """Workers that do not serve yet, and since when they are asked for."""
        starting = (life for life in self._alive.values() if life.worker.state is WorkerState.STARTING)
        return {life.worker.worker_id: life.asked_at for life in starting}

    def router_counts(self) -> RouterCounts:
        """What the router tells a controller."""
        return RouterCounts(self.counts.answered, self.counts.in_goal, len(self._held))

    def paid_s(self) -> float:
        """Seconds that all workers together were paid for until now."""
        return sum(life.paid_s(self.now) for life in self._lives)

    def _serving(self) -> bool:
        return any(life.worker.state is WorkerState.SERVING for life in self._alive.values())

    def _start(self, startup_s: float) -> None:
        worker = self._new_worker()
        life = Life(worker, self.now, self.now + startup_s)
        worker.state = WorkerState.STARTING if startup_s > 0 else WorkerState.SERVING
        self._lives.append(life)
        self._alive[worker.worker_id] = life
        self._router.registry.join(worker)

    def _let_go(self, life: Life) -> None:
        life.worker.state = WorkerState.DRAINING
        self._router.registry.changed()
        self._end_if_done(life.worker)

    def _end_if_done(self, worker: SimulatedWorker) -> None:
        if worker.state is WorkerState.DRAINING and worker.scheduler.idle:
            worker.state = WorkerState.STOPPED
            self._alive.pop(worker.worker_id).ended_at = self.now
            self._router.leave(worker.worker_id)

    def _end_step(self, worker: SimulatedWorker) -> None:
        super()._end_step(worker)
        self._end_if_done(worker)

    def _send(self, served: Served) -> None:
        if self._serving():
            super()._send(served)
        else:
            self._held.append(served)

    def _anybody_held(self) -> bool:
        return bool(self._held)

    def _answered(self, served: Served) -> None:
        self.counts.answered += 1
        self.counts.in_goal += served.first_token_at - served.arrived_at <= self.goal_s


def _worth(life: Life) -> tuple[bool, float, int, int]:
    """What is given up by letting a worker go: the least first."""
    scheduler = life.worker.scheduler
    if life.worker.state is WorkerState.STARTING:
        return False, -life.asked_at, 0, 0
    return True, 0.0, len(scheduler.running) + len(scheduler.waiting), life.worker.pool.usage().cached
