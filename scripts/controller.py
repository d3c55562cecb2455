"""The controller: keeps as many workers as there are to be, drains those that go, warms those that come.

    look (Ray: which actors, Redis: how they are) -> plan (fleet_plan.py) -> create, drain, end

It keeps nothing that it could not find again (fleet_memory.py), so it may end at any moment: workers serve on
without it, and the next controller goes on where it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvhive.proto.errors import ClusterError, KvhiveError
from kvhive.proto.index_schema import WorkerRecord, WorkerState
from kvhive.router.autoscaling_policy import ScalingDecision
from kvhive.router.cache_value import CacheValues
from kvhive.router.worker_registry import WorkerView
from kvhive.scripts.drain import DEFAULT_TIMEOUT_S, DrainMeans, DrainOrder, DrainProgress, drain
from kvhive.scripts.fleet_memory import FleetMemory
from kvhive.scripts.fleet_plan import FleetPlan, Seen, Stage, plan
from kvhive.scripts.hand_over import HandOver, HeldKeys, hand_over
from kvhive.scripts.worker_calls import WorkerCalls

log = logging.getLogger(__name__)

MAX_WORKERS = 1024
"""Most that can be asked for; the registry reads 4096."""
FAILED_SHOWN_S = 10.0
"""A worker whose start failed is seen by `kvhive up` and `status` for so long, and then replaced."""
RETRY_FIRST_S, RETRY_LONGEST_S = 5.0, 300.0
"""Between replacements of workers that failed or died, twice as long each time until one serves."""
LEAVING_NODE_DRAIN_S = 30.0
"""A machine that is pre-empted goes within some 30 s to 2 minutes."""
REMEMBERED_DRAINS = 64
RECORD_POLL_S = 0.1
WARM_GIVERS = 2
"""Peers whose hot chains a new worker gets: those whose caches are worth most."""


class View(Protocol):
    """What fleet_actors.ActorView says."""

    @property
    def phase(self) -> str:
        """Where it is, in a word."""

    @property
    def detail(self) -> str:
        """What it does, for people."""

    @property
    def node(self) -> str:
        """The Ray node that it is on."""


class Actors(Protocol):
    """The actors, as fleet_actors.FleetActors has them; its methods may block for a moment."""

    def create(self, worker_id: str, warm_s: float) -> None:
        """Create one; it may take long to get a place."""

    def poll(self) -> Mapping[str, View]:
        """Say how each is."""

    def end(self, worker_id: str, grace_s: float) -> None:
        """Stop its server and end it."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a controller sees the fleet by, and reaches it through."""

    actors: Actors
    leaving_nodes: Callable[[], set[str]]
    workers: Callable[[], list[WorkerView]]
    """Those that are registered now."""
    calls: WorkerCalls
    index: HeldKeys
    free: Callable[[], str]
    """What of Ray's resources is free, for people."""
    clock: Callable[[], float]
    lease_s: float = 0.0
    """A worker that lives is among `workers` by then, however lately those began to be followed."""


class Policy(Protocol):
    """What autoscaling asks for, as autoscaler.Autoscaler does."""

    def decide(self, views: list[WorkerView], stages: Mapping[str, Stage], now: float) -> ScalingDecision:
        """Say how many workers there should be, and why."""


class Controller:
    """One cluster's. For one event loop; what blocks is done in threads."""

    def __init__(
        self, memory: FleetMemory, around: Surroundings, warm_s: float = 0.0, policy: Policy | None = None
    ) -> None:
        """Without a policy the number of workers is what people ask for."""
        self._memory = memory
        self._around = around
        self._warm_s = warm_s
        self._policy = policy
        self._reason = "as asked for"
        self._free = ""
        self._values = CacheValues()
        self._views: dict[str, View] = {}
        self._stages: dict[str, Stage] = {}
        self._records: dict[str, WorkerRecord] = {}
        self._leaving: set[str] = set()
        self._failed_at: dict[str, float] = {}
        self._drains: dict[str, DrainProgress] = {}
        self._past: OrderedDict[str, DrainProgress] = OrderedDict()
        self._warming: dict[str, int] = {}
        """Worker -> the epoch in which it was warmed: one that Ray has restarted is empty again."""
        self._found: set[str] | None = None
        """Those that a controller before this one created."""
        self._known_at = 0.0
        """By then all that live have been seen registered."""
        self._untried: set[str] = set()
        """Created since the last failure, and none has served yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry_s, self._retry_at = 0.0, 0.0
        self._means = DrainMeans(around.calls, around.index, self._records.get, self._heirs, self._end)

    @property
    def autoscaling(self) -> bool:
        """Whether a policy decides how many workers there are."""
        return self._policy is not None

    async def step(self) -> FleetPlan:
        """Look, plan and act once; returns what was begun."""
        await self._look()
        if self._policy is not None:
            wish = self._policy.decide(self._around.workers(), self._stages, self._around.clock())
            self._reason = wish.reason.value
            if wish.target != self._memory.wanted:
                log.info("wanted=%d before=%d reason=%s", wish.target, self._memory.wanted, wish.reason)
                self._memory.wanted = wish.target
                self._memory.save()
        found = plan(self._seen(), self._memory.wanted)
        await self._act(found)
        if not self._tasks:  # nobody is speaking on a connection that this may close
            await self._around.calls.retain({record.address for record in self._records.values()})
        return found

    async def drain(self, order: DrainOrder) -> int:
        """Begin to drain a worker; return how many are wanted from now on. Raises ClusterError.

        With autoscaling the number is the policy's: it may bring another one.
        """
        stage = self._stages.get(order.worker_id)
        if order.worker_id in self._drains:
            raise ClusterError(f"worker {order.worker_id} is being drained already")
        if stage is None:
            raise ClusterError(f"there is no worker {order.worker_id!r}: {', '.join(sorted(self._stages))}")
        others = [w for w, other in self._stages.items() if other == "serving" and w != order.worker_id]
        if stage == "serving" and not others and self._policy is None:
            raise ClusterError(
                f"worker {order.worker_id} is the only one that serves: `kvhive scale` up first, "
                "or `kvhive down`"
            )
        if self._policy is None:
            self._memory.wanted = max(0, self._memory.wanted - 1)
        self._begin_drain(order)  # one that does not serve is stopped at once, and may take its time
        return self._memory.wanted

    async def scale(self, wanted: int) -> int:
        """Have so many workers from now on; return how many were wanted before. Raises ClusterError."""
        if self._policy is not None:
            raise ClusterError(
                "autoscaling.enabled is on, and decides: set autoscaling.min_workers and max_workers"
            )
        if not 0 <= wanted <= MAX_WORKERS:
            raise ClusterError(f"workers: must be 0 to {MAX_WORKERS}, are {wanted}")
        before, self._memory.wanted = self._memory.wanted, wanted
        self._memory.save()
        return before

    def document(self) -> dict[str, Any]:
        """Return everything that people may want to know, in plain values."""
        return {
            "wanted": self._memory.wanted,
            "autoscaling": self.autoscaling,
            "reason": self._reason,
            "device": self._memory.device,
            "dtype": self._memory.dtype,
            "free": self._free,
            "workers": [self._describe(worker_id) for worker_id in sorted(self._views)],
            "drains": {worker: progress.document() for worker, progress in self._drains.items()},
            "drained": {worker: progress.document() for worker, progress in self._past.items()},
        }

    async def close(self) -> None:
        """Leave everything as it is; drains under way are the next controller's."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look(self) -> None:
        around, now = self._around, self._around.clock()
        self._views = dict(await asyncio.to_thread(around.actors.poll))
        if self._found is None:
            self._found, self._known_at = set(self._views), now + around.lease_s
        leaving = await asyncio.to_thread(around.leaving_nodes)
        waits = any(view.phase == "pending" for view in self._views.values())
        self._free = await asyncio.to_thread(around.free) if waits else ""
        self._records.clear()
        for view in around.workers():
            record = view.record
            self._records[record.worker_id] = record
            self._values.note(record.worker_id, record.epoch, record.load, now)
        self._values.retain(set(self._views))
        self._leaving = {worker_id for worker_id, view in self._views.items() if view.node in leaving}
        self._stages = {
            worker_id: self._stage(worker_id, view, now) for worker_id, view in self._views.items()
        }
        for worker_id, stage in self._stages.items():
            if stage == "warming" and self._warming.get(worker_id) != self._records[worker_id].epoch:
                self._spawn(self._warm(worker_id))
            elif stage == "draining" and worker_id not in self._drains:  # an earlier controller began it
                bound, hands = self._memory.drains.get(worker_id, (DEFAULT_TIMEOUT_S, True))
                self._begin_drain(DrainOrder(worker_id, bound, hands))
        if any(self._stages.get(worker_id) == "serving" for worker_id in self._untried):
            self._retry_s = 0.0
            self._untried.clear()

    def _is_strange(self, worker_id: str) -> bool:
        """Whether it may serve without our having seen it: it was here first, and we have just come."""
        late = self._around.clock() >= self._known_at
        return not late and worker_id in (self._found or ()) and worker_id not in self._records

    def _stage(self, worker_id: str, view: View, now: float) -> Stage:
        record = self._records.get(worker_id)
        if worker_id in self._drains or worker_id in self._memory.drains:
            return "draining"
        if view.phase == "failed":
            since = self._failed_at.setdefault(worker_id, now)
            return "failed" if now - since > FAILED_SHOWN_S else "starting"
        self._failed_at.pop(worker_id, None)
        if view.phase in ("dead", "stopped") or (view.phase == "hung" and record is None):
            return "dead"
        if view.phase == "serving" or (view.phase == "pending" and record is not None):
            # What is registered has a place: it has only not got round to answering us yet.
            match record.state if record else WorkerState.SERVING:
                case WorkerState.DRAINING:
                    return "draining"
                case WorkerState.WARMING:
                    return "warming"
                case WorkerState.STARTING if view.phase == "pending":
                    return "starting"
            return "serving"
        if view.phase == "hung":  # its lease is renewed: it is Ray that does not get through
            return "serving"
        return "pending" if view.phase == "pending" else "starting"

    def _seen(self) -> list[Seen]:
        now = self._around.clock()
        return [
            Seen(worker_id, stage, self._values.value_s(worker_id, now), worker_id in self._leaving)
            for worker_id, stage in self._stages.items()
        ]

    async def _act(self, found: FleetPlan) -> None:
        for worker_id in found.end:
            if self._stages[worker_id] not in ("failed", "dead") and self._is_strange(worker_id):
                continue  # what it is will be known in a moment
            log.warning("ending worker_id=%s stage=%s", worker_id, self._stages[worker_id])
            if self._stages[worker_id] in ("failed", "dead"):
                self._retry_s = min(max(RETRY_FIRST_S, 2 * self._retry_s), RETRY_LONGEST_S)
                self._retry_at = self._around.clock() + self._retry_s
                self._untried.clear()
            await self._end(worker_id)
        for worker_id in found.drain:
            bound = LEAVING_NODE_DRAIN_S if worker_id in self._leaving else DEFAULT_TIMEOUT_S
            self._begin_drain(DrainOrder(worker_id, bound))
        if found.create and self._around.clock() >= self._retry_at:
            warm_s = self._warm_s if "serving" in self._stages.values() else 0.0
            for _ in range(found.create):
                worker_id = self._memory.next_id()
                log.info("creating worker_id=%s", worker_id)
                await asyncio.to_thread(self._around.actors.create, worker_id, warm_s)
                self._untried.add(worker_id)

    def _begin_drain(self, order: DrainOrder) -> None:
        log.info("draining %s", order)
        progress = self._drains[order.worker_id] = DrainProgress(order)
        self._stages[order.worker_id] = "draining"
        self._memory.drains[order.worker_id] = order.timeout_s, order.hand_over
        self._memory.save()
        self._spawn(self._drain(order, progress))

    async def _drain(self, order: DrainOrder, progress: DrainProgress) -> None:
        try:
            while self._is_strange(order.worker_id):  # without its record it would be cut off
                progress.step = "looking for it"
                await asyncio.sleep(RECORD_POLL_S)
            await drain(order, self._means, progress)
        finally:
            del self._drains[order.worker_id]
        self._past[order.worker_id] = progress
        while len(self._past) > REMEMBERED_DRAINS:
            self._past.popitem(last=False)

    async def _end(self, worker_id: str) -> None:
        await asyncio.to_thread(self._around.actors.end, worker_id, 0.0)
        self._untried.discard(worker_id)
        for known in (self._views, self._stages, self._failed_at, self._warming, self._memory.drains):
            known.pop(worker_id, None)
        self._memory.save()

    def _heirs(self) -> list[WorkerRecord]:
        """Who serves, and will."""
        return [
            record
            for worker_id, record in self._records.items()
            if self._stages.get(worker_id) == "serving" and worker_id not in self._leaving
        ]

    async def _warm(self, worker_id: str) -> None:
        """Give a new worker what its peers have that is hot, within its time, and let it serve."""
        progress, record, around = HandOver(), self._records[worker_id], self._around
        epoch = self._warming[worker_id] = record.epoch
        now = around.clock()
        givers = sorted(self._heirs(), key=lambda r: self._values.value_s(r.worker_id, now), reverse=True)
        try:
            async with asyncio.timeout(self._warm_s):
                while not record.load.blocks_total:  # its first report, made before it had a pool
                    await asyncio.sleep(RECORD_POLL_S)
                    record = self._records.get(worker_id, record)
                for giver in givers[:WARM_GIVERS]:
                    await hand_over(giver, [record], around.calls, around.index, progress)
        except (TimeoutError, KvhiveError) as error:
            progress.error = str(error) or "the time was over"
        log.info("warmed worker_id=%s blocks=%d error=%s", worker_id, progress.blocks_done, progress.error)
        if self._stages.get(worker_id) != "warming" or self._warming.get(worker_id) != epoch:
            return  # it serves by itself, is to go, or is another one by now
        try:
            await around.calls.set_state(record, WorkerState.SERVING)
        except KvhiveError as error:  # it serves by itself when its time is over
            log.warning("not told to serve worker_id=%s: %s", worker_id, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _describe(self, worker_id: str) -> dict[str, Any]:
        view = self._views[worker_id]
        document = {
            "id": worker_id,
            "phase": view.phase,
            "stage": self._stages.get(worker_id, "starting"),
            "detail": view.detail,
            "node": view.node,
        }
        if worker_id in self._leaving:
            document["detail"] = "its machine is about to go"
        return document


Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def answers(controller: Controller) -> Answer:
    """Return what answers the control socket."""

    async def answer(question: dict[str, Any]) -> dict[str, Any]:
        match question:
            case {"do": "fleet"}:
                return controller.document()
            case {"do": "scale", "workers": int(wanted)}:
                return {"before": await controller.scale(wanted), "wanted": wanted}
            case {"do": "drain", "worker": str(worker), "timeout_s": float(bound), "hand_over": bool(hands)}:
                wanted = await controller.drain(DrainOrder(worker, bound, hands))
                return {"wanted": wanted, "autoscaling": controller.autoscaling}
        raise ClusterError(f"control: not a question: {question!r}"[:200])

    return answer
