"""A fleet that is quick to simulate: a queue of prompts per worker, a router that takes the soonest answer.

For days of hundreds of workers, where every step of a real scheduler would be too many. A prompt takes the
seconds of the cost model for what its worker does not hold of it, first come, first served; its answer is
decoded beside other prompts and slows nobody. Caches hold whole sessions and system prompts, the least
recently used go. The router knows all of that exactly, and compares whoever holds the session with whoever
is free first. The workers' reports are made of the same numbers, so that the autoscaling policy and its
signals are the real ones.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvhive.proto.index_schema import LoadReport, WorkerRecord, WorkerState
from kvhive.router.autoscaling_signals import RouterCounts
from kvhive.router.worker_registry import WorkerView
from kvhive.scripts.sim_costs import CostModel
from kvhive.scripts.sim_run import Fleet, Served
from kvhive.scripts.trace_format import Trace, TraceRequest

PRICE = 2.0
"""Of a second of prefill to everybody, as router/routing_cost.py has it where half of the time is busy."""


@dataclass(slots=True)
class _Worker:
    worker_id: str
    asked_at: float
    ready_at: float
    state: WorkerState
    ended_at: float = math.inf
    free_at: float = 0.0
    """When what it has been given is computed."""
    ends: list[float] = field(default_factory=list)
    """A heap: when its answers end."""
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """First block of a chain -> its tokens, least recently used first."""
    cached_tokens: int = 0
    queries: int = 0
    hits: int = 0
    admitted: int = 0
    pairs: int = 0

    def holds(self, chain: int) -> int:
        """Tokens of a chain that are cached."""
        return self.cache.get(chain, 0)

    def keep(self, chain: int, tokens: int, capacity: int) -> None:
        """Remember a chain; forget others for it."""
        self.cached_tokens += tokens - self.cache.pop(chain, 0)
        self.cache[chain] = tokens
        while self.cached_tokens > capacity and len(self.cache) > 1:
            self.cached_tokens -= self.cache.popitem(last=False)[1]


class QuickFleet:
    """What ElasticSimulation is, for traces whose prompts are a system prompt and a session's own part."""

    def __init__(self, trace: Trace, fleet: Fleet, goal_s: float) -> None:
        self.now = 0.0
        self.goal_s = goal_s
        self.served: list[Served] = []
        self._requests = trace.requests
        self._block = trace.block_size
        self._cost: CostModel = fleet.cost
        self._capacity = fleet.capacity_blocks * fleet.block_size
        self._block_size = fleet.block_size
        self._workers: list[_Worker] = []
        self._ended_s = 0.0
        self._named = 0
        self._serving: list[_Worker] = []
        self._holder: dict[int, _Worker] = {}
        self._held: list[Served] = []
        self._coming: list[tuple[float, bool]] = []  # a heap: (first token, whether within the goal)
        self._counts = [0, 0]
        self._next = 0
        for _ in range(fleet.workers):
            self._start(0.0)

    def begin(self) -> None:
        """Nothing: the requests are in order."""

    def advance(self, until: float, tell: Callable[[int], None] = lambda done: None) -> bool:
        """Let everybody arrive until a moment; return whether anything happens after it."""
        requests = self._requests
        while self._next < len(requests) and requests[self._next].arrival <= until:
            request = requests[self._next]
            self.now = request.arrival
            served = Served(self._next, self.now, request.prompt_tokens, request.output_tokens)
            self._next += 1
            self.served.append(served)
            self._send(served, request)
            tell(self._next)
        last = max((served.finished_at for served in self.served[-1000:]), default=0.0)
        more = self._next < len(requests) or bool(self._held) or last > until
        self.now = until if more else max(self.now, last)
        while self._coming and self._coming[0][0] <= self.now:
            self._counts[1] += heapq.heappop(self._coming)[1]
            self._counts[0] += 1
        return more

    def resize(self, count: int, startup_s: float) -> None:
        """Ask for so many workers, starting and serving ones together."""
        present = [worker for worker in self._workers if worker.state is not WorkerState.DRAINING]
        for _ in range(count - len(present)):
            self._start(startup_s)
        for worker in sorted(present, key=self._worth)[: max(0, len(present) - count)]:
            worker.state = WorkerState.DRAINING
            worker.ended_at = max(self.now, max(worker.ends, default=0.0))
        self._sort_out()

    def promote(self) -> None:
        """Let those serve that are ready by now, and those go that have drained."""
        for worker in self._workers:
            if worker.state is WorkerState.STARTING and worker.ready_at <= self.now:
                worker.state = WorkerState.SERVING
        self._sort_out()
        held, self._held = (self._held, []) if self._serving else ([], self._held)
        for served in held:
            self._send(served, self._requests[served.number])

    def views(self) -> list[WorkerView]:
        """What a controller sees: up to date, without heartbeats."""
        return [self._view(worker) for worker in self._workers]

    def asked_for(self) -> dict[str, float]:
        """Workers that do not serve yet, and since when they are asked for."""
        starting = (worker for worker in self._workers if worker.state is WorkerState.STARTING)
        return {worker.worker_id: worker.asked_at for worker in starting}

    def router_counts(self) -> RouterCounts:
        """What the router tells a controller."""
        return RouterCounts(self._counts[0], self._counts[1], len(self._held))

    def paid_s(self) -> float:
        """Seconds that all workers together were paid for until now."""
        return self._ended_s + sum(min(each.ended_at, self.now) - each.asked_at for each in self._workers)

    def _start(self, startup_s: float) -> None:
        state = WorkerState.STARTING if startup_s > 0 else WorkerState.SERVING
        self._workers.append(_Worker(f"w{self._named}", self.now, self.now + startup_s, state))
        self._named += 1
        self._sort_out()

    def _sort_out(self) -> None:
        gone = [each for each in self._workers if each.ended_at <= self.now]
        if gone:
            self._ended_s += sum(each.ended_at - each.asked_at for each in gone)
            self._workers = [each for each in self._workers if each.ended_at > self.now]
        self._serving = [each for each in self._workers if each.state is WorkerState.SERVING]

    def _worth(self, worker: _Worker) -> tuple[bool, float, float]:
        if worker.state is WorkerState.STARTING:
            return False, -worker.asked_at, 0.0
        return True, max(0.0, worker.free_at - self.now), worker.cached_tokens

    def _send(self, served: Served, request: TraceRequest) -> None:
        if not self._serving:
            self._held.append(served)
            return
        system, system_blocks, own, _ = request.runs
        first = min(self._serving, key=_free_at)
        worker, (answer_at, cached) = first, self._answer_at(first, served, system, own)
        holder = self._holder.get(own)
        if holder is not None and holder.state is WorkerState.SERVING:
            there = self._answer_at(holder, served, system, own)
            if self._cost_s(there[0], holder) <= self._cost_s(answer_at, first):
                worker, (answer_at, cached) = holder, there
        new = served.prompt_tokens - cached
        worker.queries += served.prompt_tokens
        worker.hits += cached
        worker.admitted += 1
        worker.pairs += new * (cached + new // 2)
        worker.free_at = answer_at
        worker.keep(system, system_blocks * self._block, self._capacity)
        worker.keep(own, served.prompt_tokens, self._capacity)
        self._holder[own] = worker
        served.worker_id, served.cached_tokens, served.first_token_at = worker.worker_id, cached, answer_at
        steps = served.output_tokens - 1
        served.finished_at = answer_at + self._cost.decodes_s(steps, 1, served.prompt_tokens)
        heapq.heappush(worker.ends, served.finished_at)
        heapq.heappush(self._coming, (answer_at, answer_at - served.arrived_at <= self.goal_s))

    def _cost_s(self, answer_at: float, worker: _Worker) -> float:
        """What an answer costs everybody: the wait, and its own prefill at its price."""
        own_s = answer_at - max(self.now, worker.free_at)
        return answer_at + (PRICE - 1) * own_s

    def _answer_at(self, worker: _Worker, served: Served, system: int, own: int) -> tuple[float, int]:
        """When a worker would give the first token, and how much of the prompt it would find."""
        cached = min(max(worker.holds(own), worker.holds(system)), served.prompt_tokens - self._block)
        begins = max(self.now, worker.free_at)
        return begins + self._cost.prefill_s(served.prompt_tokens - cached, cached), cached

    def _view(self, worker: _Worker) -> WorkerView:
        while worker.ends and worker.ends[0] <= self.now:
            heapq.heappop(worker.ends)
        cost, running = self._cost, len(worker.ends)
        total = self._capacity // self._block_size
        cached = worker.cached_tokens // self._block_size
        load = LoadReport(
            queued_prefill_tokens=int(max(0.0, worker.free_at - self.now) / cost.per_token_s),
            running=running,
            max_running=cost.max_running,
            blocks_total=total,
            blocks_cached=min(cached, total),
            blocks_free=max(0, total - cached),
            step_base_s=cost.step_base_s,
            step_per_token_s=cost.per_token_s,
            step_per_attention_s=cost.per_attention_s,
            max_step_tokens=cost.max_step_tokens,
            prefix_queries=worker.queries,
            prefix_hits=worker.hits,
            admitted=worker.admitted,
            prefill_pairs=worker.pairs,
        )
        return WorkerView(_record(worker, self._block_size, load), self.now)


def _free_at(worker: _Worker) -> float:
    return worker.free_at


def _record(worker: _Worker, block_size: int, load: LoadReport) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker.worker_id,
        address="",
        epoch=1,
        model="simulated",
        model_identity="",
        block_size=block_size,
        max_context=1 << 30,
        vocab_size=1,
        state=worker.state,
        device="simulated",
        pid=0,
        load=load,
    )


def check_quick(requests: Iterable[TraceRequest]) -> bool:
    """Whether requests are of the shape that this fleet understands."""
    return all(len(request.runs) == 4 for request in requests)
