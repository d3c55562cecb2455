"""The router of a simulation: the real Placer, mirror, predictions and loads, fed by simulated workers.

What a real router reads late is late here too: load reports by heartbeat and poll, the index by the time a
worker takes to publish plus a lag that can be chosen.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.config import RedisConfig, RouterConfig
from kvhive.proto.index_schema import WorkerRecord, WorkerState
from kvhive.proto.kv_events import EventBatch
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.load_tracker import LoadTracker
from kvhive.router.placement import Placement, Placer, RoutingState
from kvhive.router.predicted_blocks import PredictedBlocks
from kvhive.router.prompt import HOME_BLOCKS, PreparedPrompt
from kvhive.router.routing_policy import RoutingPolicy
from kvhive.router.worker_registry import WorkerRegistry, WorkerView
from kvhive.scripts.sim_worker import SimulatedWorker

PUBLISH_S = 0.005
"""From the end of a step until a router knows the blocks it made; a real one was measured at 1.4 ms."""

POLL_S = 0.25
"""How often a router reads the workers' reports."""

IDLE_VIEW_S = 5.0
"""An idle worker's report is kept this long: all that changes in it is how long its cache has been idle."""


@dataclass(slots=True)
class _Member:
    worker: SimulatedWorker
    phase: float
    """When its heartbeats come."""
    step: int = -1
    view: WorkerView | None = None


class SimulatedRegistry:
    """What the Placer asks a WorkerRegistry: who is there, and what they last said of themselves."""

    def __init__(self, block_size: int, seed: int, coarse: float) -> None:
        self._block_size = block_size
        self._heartbeat_s = RedisConfig().heartbeat_s * coarse
        self._poll_s = POLL_S * coarse
        self._noise = random.Random(seed)
        self._members: dict[str, _Member] = {}
        self._polled_at = -math.inf
        self._views: list[WorkerView] = []
        self._routable: list[WorkerView] = []

    def join(self, worker: SimulatedWorker) -> None:
        """Let a worker be known from now on."""
        phase = self._noise.random() * self._heartbeat_s
        self._members[worker.worker_id] = _Member(worker, phase)
        self.changed()

    def leave(self, worker_id: str) -> None:
        """Forget a worker."""
        del self._members[worker_id]
        self.changed()

    def changed(self) -> None:
        """A worker has another state: whoever asks next sees it."""
        self._polled_at = -math.inf

    def views(self, now: float) -> list[WorkerView]:
        """All workers, as of the last poll and the heartbeat before it."""
        poll = math.floor(now / self._poll_s) * self._poll_s
        if poll > self._polled_at:
            self._polled_at = poll
            self._views = [self._latest(member, poll) for member in self._members.values()]
            self._routable = [view for view in self._views if view.record.state is WorkerState.SERVING]
        return self._views

    def routable(self, now: float) -> list[WorkerView]:
        """The workers that serve."""
        self.views(now)
        return self._routable

    def serving(self) -> list[WorkerView]:
        """The same, as of the last look: none has failed."""
        return self._routable

    def _latest(self, member: _Member, poll: float) -> WorkerView:
        """The view of a worker's last heartbeat: the last view, if nothing has happened since."""
        beats = math.floor((poll - member.phase) / self._heartbeat_s)
        at = max(0.0, member.phase + beats * self._heartbeat_s)
        worker, last = member.worker, member.view
        step = worker.last_step(at)
        if last is not None and last.record.state is worker.state:
            quiet = step == member.step and at - last.reported_at < IDLE_VIEW_S
            if quiet or last.reported_at == at:
                return last
        member.step = step
        member.view = view = self._view(worker, at)
        return view

    def excluded(self, now: float) -> dict[str, str]:
        """Nobody: simulated workers do not fail."""
        return {}

    def placed(self, worker_id: str) -> None:
        """Nothing to remember, for the same reason."""

    def _view(self, worker: SimulatedWorker, at: float) -> WorkerView:
        record = WorkerRecord(
            worker_id=worker.worker_id,
            address="",
            epoch=1,
            model="simulated",
            model_identity="",
            block_size=self._block_size,
            max_context=1 << 30,
            vocab_size=1,
            state=worker.state,
            device="simulated",
            pid=0,
            load=worker.report(at),
        )
        return WorkerView(record, at)


@dataclass(slots=True)
class DecisionTime:
    """CPU seconds that decisions took; the only thing in a simulation that two runs differ in."""

    count: int = 0
    total_s: float = 0.0


class SimulatedRouter:
    """Places requests and learns what the workers do."""

    def __init__(
        self,
        workers: Sequence[SimulatedWorker],
        policy: RoutingPolicy,
        block_size: int,
        clock: Callable[[], float],
        index_lag_s: float = 0.0,
        seed: int = 0,
        coarse: float = 1.0,
    ) -> None:
        config = RouterConfig()
        self._clock = clock
        self._delay_s = PUBLISH_S + index_lag_s
        self._lag_s = index_lag_s
        self._homes = seed.to_bytes(hashlib.blake2b.SALT_SIZE, "little")  # another seed, other homes
        self._mirror = KvIndexMirror(clock)
        self._predicted = PredictedBlocks(config.predicted_ttl_s)
        self._loads = LoadTracker()
        self._published: deque[tuple[float, str, EventBatch]] = deque()
        self.registry = SimulatedRegistry(block_size, seed, coarse)
        for worker in workers:
            self.registry.join(worker)
        state = RoutingState(cast(WorkerRegistry, self.registry), self._mirror, self._predicted, self._loads)
        self._placer = Placer(state, policy, block_size, config.index_stale_after_s, clock)
        self.decisions = DecisionTime()

    def place(
        self, request_id: str, prompt_tokens: int, keys: tuple[BlockKey, ...], max_tokens: int
    ) -> Placement:
        """Choose a worker. Raises InvalidRequest when none could ever hold the request."""
        now = self._clock()
        self._hear(now)
        home = b"blocks" + keys[:HOME_BLOCKS][-1] if keys else request_id.encode()
        # Nobody looks into the tokens of a prompt whose keys are known; only how many there are counts.
        tokens = cast("tuple[int, ...]", range(prompt_tokens))
        prompt = PreparedPrompt(
            tokens, b"", keys, hashlib.blake2b(home, salt=self._homes).digest(), keyed=False
        )
        began = time.thread_time()
        try:
            return self._placer.place(request_id, prompt, max_tokens)
        finally:
            self.decisions.total_s += time.thread_time() - began
            self.decisions.count += 1

    def publish(self, worker_id: str, changes: EventBatch) -> None:
        """A worker's cache has changed; the router hears of it after the lag."""
        if changes:
            self._published.append((self._clock() + self._delay_s, worker_id, changes))

    def leave(self, worker_id: str) -> None:
        """Forget a worker that has stopped."""
        self.registry.leave(worker_id)
        self._published = deque(each for each in self._published if each[1] != worker_id)
        self._predicted.drop(worker_id)
        self._loads.drop(worker_id)
        self._mirror.drop(worker_id)
        while self._mirror.sweep():
            pass

    def first_token(self, request_id: str) -> None:
        """A request's prompt is computed."""
        self._loads.first_token(request_id, self._clock())

    def finish(self, request_id: str) -> None:
        """A request has ended."""
        self._loads.finish(request_id, self._clock())

    def _hear(self, now: float) -> None:
        published = self._published
        while published and published[0][0] <= now:
            _, worker_id, changes = published.popleft()
            self._mirror.apply(worker_id, changes)
            self._predicted.forget(worker_id, changes.stored)
        self._mirror.touch(max(0.0, now - self._lag_s))
