"""Routers without processes: Placers over one index and workers that exist as records, on one clock."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import cast

from worker_records import Clock, record

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.index_schema import LoadReport
from kvhive.proto.kv_events import EventBatch
from kvhive.router.kv_index_mirror import KvIndexMirror
from kvhive.router.load_tracker import LoadTracker
from kvhive.router.placement import Placement, Placer, RoutingState
from kvhive.router.policies import make_policy
from kvhive.router.predicted_blocks import PredictedBlocks
from kvhive.router.prompt import HOME_BLOCKS, PreparedPrompt
from kvhive.router.worker_registry import WorkerRegistry, WorkerView

BLOCK = 16
IDLE = LoadReport(
    blocks_total=65536,
    blocks_free=65536,
    step_base_s=0.005,
    step_per_token_s=0.0001,
    step_per_attention_s=1e-9,
    max_step_tokens=2048,
)


def cold_prompt(seed: int, tokens: int = 1000, key: str = "", shared_blocks: int = 0) -> PreparedPrompt:
    """A prompt like no other, but for its first `shared_blocks` blocks, which all of them have in common."""
    common, own = random.Random("common"), random.Random(seed)
    blocks = range(tokens // BLOCK)
    keys = tuple(BlockKey((common if i < shared_blocks else own).randbytes(16)) for i in blocks)
    home = key.encode() if key else (keys[:HOME_BLOCKS][-1] if keys else own.randbytes(16))
    return PreparedPrompt((0,) * tokens, b"", keys, home, keyed=bool(key))


@dataclass
class Sent:
    """A request at a worker."""

    router: int
    request_id: str
    prompt: PreparedPrompt
    placement: Placement

    @property
    def uncached_tokens(self) -> int:
        return len(self.prompt.token_ids) - self.placement.expected_blocks * BLOCK


class PlacedFleet:
    """Workers that do nothing until `complete`, and report what they have to do when `report` is called."""

    def __init__(self, workers: int = 8, routers: int = 1, policy: str = "kv_aware") -> None:
        self.clock = Clock()
        self.mirror = KvIndexMirror(self.clock)
        self.running: dict[str, list[Sent]] = {}
        self._loads: dict[str, LoadReport] = {}
        self.views: list[WorkerView] = []
        self.states: list[RoutingState] = []
        self.placers: list[Placer] = []
        self._sent = 0
        self.join(*(f"w{i}" for i in range(workers)))
        for seed in range(routers):
            state = RoutingState(
                cast(WorkerRegistry, self), self.mirror, PredictedBlocks(30.0), LoadTracker()
            )
            self.states.append(state)
            self.placers.append(Placer(state, make_policy(policy, seed), BLOCK, 1e9, self.clock))

    def routable(self, now: float) -> list[WorkerView]:
        """As WorkerRegistry's."""
        return self.views

    def serving(self) -> list[WorkerView]:
        """As WorkerRegistry's."""
        return self.views

    def excluded(self, now: float) -> dict[str, str]:
        return {}

    def placed(self, worker_id: str) -> None:
        pass

    def join(self, *worker_ids: str, **changes: object) -> None:
        """Let new workers come, cold."""
        for worker_id in worker_ids:
            self.running[worker_id] = []
            self._loads[worker_id] = dataclasses.replace(IDLE, **changes)  # type: ignore[arg-type]
        self.report()

    def leave(self, worker_id: str) -> None:
        """Let a worker go, and its cache with it."""
        del self.running[worker_id], self._loads[worker_id]
        self.mirror.drop(worker_id)
        for state in self.states:
            state.predicted.drop(worker_id)
            state.loads.drop(worker_id)
        self.report()

    def send(self, prompt: PreparedPrompt, router: int = 0, max_tokens: int = 16) -> Placement:
        """Let a router place a request."""
        self._sent += 1
        request_id = f"r{self._sent}"
        placement = self.placers[router].place(request_id, prompt, max_tokens)
        self.running[placement.worker_id].append(Sent(router, request_id, prompt, placement))
        return placement

    def complete(self) -> None:
        """Let every request get its tokens and end, and its blocks appear in the index."""
        for worker_id, sent in self.running.items():
            load = self._loads[worker_id]
            for each in sent:
                state = self.states[each.router]
                state.loads.first_token(each.request_id, self.clock())
                state.loads.finish(each.request_id, self.clock())
                held = self.mirror.match(each.prompt.keys).get(worker_id, 0)
                self._publish(worker_id, each.prompt.keys[held:])
                load = dataclasses.replace(
                    load,
                    prefix_queries=load.prefix_queries + len(each.prompt.token_ids),
                    prefix_hits=load.prefix_hits + held * BLOCK,
                )
            self._loads[worker_id] = load
            sent.clear()

    def report(self) -> None:
        """Let every worker report its load, and every router read it."""
        self.mirror.touch(self.clock())
        self.views = [
            WorkerView(record(worker_id, load=self._report(worker_id)), self.clock())
            for worker_id in sorted(self.running)
        ]

    def _report(self, worker_id: str) -> LoadReport:
        queued = sum(sent.uncached_tokens for sent in self.running[worker_id])
        return dataclasses.replace(
            self._loads[worker_id],
            queued_prefill_tokens=queued,
            running=len(self.running[worker_id]),
        )

    def _publish(self, worker_id: str, keys: tuple[BlockKey, ...]) -> None:
        self.mirror.apply(worker_id, EventBatch(stored=keys))
        for state in self.states:
            state.predicted.forget(worker_id, keys)
