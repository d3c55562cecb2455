"""One simulation: a trace, a fleet and a policy on a virtual clock, event by event."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvhive.proto.block_hash import BlockHash, BlockKey
from kvhive.proto.errors import InvalidRequest
from kvhive.router.routing_policy import RoutingPolicy
from kvhive.scripts.sim_costs import CostModel
from kvhive.scripts.sim_peers import PeerFacts
from kvhive.scripts.sim_router import DecisionTime, SimulatedRouter
from kvhive.scripts.sim_worker import LONGEST_STRETCH_S, SimulatedWorker, keys_of, sequence
from kvhive.scripts.trace_arrivals import Schedule
from kvhive.scripts.trace_format import Trace
from kvhive.worker.sequence import Sequence as EngineSequence

_ANSWER_BIT = 1 << 120
"""Block ids of answers, which no prompt of a trace shares, lie above those of prompts."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated besides the trace."""

    workers: int
    capacity_blocks: int
    """Of each worker's pool."""
    block_size: int = 16
    cost: CostModel = CostModel()  # noqa: RUF009 - frozen
    index_lag_s: float = 0.0
    """How much later than its events a router's index is, beyond what publishing takes."""
    seed: int = 0
    coarse: float = 1.0
    """Heartbeats, polls and stretches of decoding are so many times as long: faster, and less exact."""


class BlockIds:
    """Block hashes of a trace's ids, made once for all policies: bytes that differ where ids do.

    A hash is as long as a key here, and so is its own key. Nothing is computed; equal ids share one object.
    """

    def __init__(self, trace: Trace, block_size: int) -> None:
        self._parts = trace.block_size // block_size
        self._block_size = block_size
        self._table = [BlockHash(n.to_bytes(16, "big")) for n in range(trace.ids * self._parts)]

    def prompt(self, prompt_tokens: int, spans: Sequence[tuple[int, int]]) -> list[BlockHash]:
        """The hashes of a prompt's full blocks."""
        parts, table = self._parts, self._table
        chain: list[BlockHash] = []
        for start, count in spans:
            chain += table[start * parts : (start + count) * parts]
        return chain[: prompt_tokens // self._block_size]

    def answer(self, number: int, prompt_tokens: int, total_tokens: int) -> list[BlockHash]:
        """Hashes of the full blocks that the answer of request `number` ends in; nobody else has them."""
        size, first = self._block_size, _ANSWER_BIT | number << 32
        blocks = total_tokens // size - prompt_tokens // size
        return [BlockHash((first + n).to_bytes(16, "big")) for n in range(blocks)]


@dataclass(slots=True)
class Served:
    """What became of one request."""

    number: int
    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    worker_id: str = ""
    cached_tokens: int = 0
    reachable_tokens: int = 0
    first_token_at: float = -1.0
    finished_at: float = -1.0
    refused: bool = False


@dataclass(slots=True)
class Outcome:
    """What a simulation gave."""

    served: list[Served]
    workers: list[SimulatedWorker] = field(repr=False)
    decisions: DecisionTime


@dataclass(slots=True)
class _Flight:
    served: Served
    seq: EngineSequence
    worker: SimulatedWorker
    keys: tuple[BlockKey, ...]


class Simulation:
    """Runs once. `facts` are kept true for peers that need them; without it nothing is kept."""

    def __init__(
        self,
        trace: Trace,
        ids: BlockIds,
        schedule: Schedule,
        fleet: Fleet,
        policy: RoutingPolicy,
        facts: PeerFacts | None = None,
    ) -> None:
        self.now = 0.0
        self._trace = trace
        self._ids = ids
        self._schedule = schedule
        self._fleet = fleet
        self._facts = facts
        self._workers: list[SimulatedWorker] = []
        self._by_id: dict[str, SimulatedWorker] = {}
        self._numbers: dict[str, int] = {}
        for _ in range(fleet.workers):
            self._new_worker()
        self._router = SimulatedRouter(
            self._workers,
            policy,
            fleet.block_size,
            self._read_clock,
            fleet.index_lag_s,
            fleet.seed,
            fleet.coarse,
        )
        self._flights: dict[str, _Flight] = {}
        self._served: list[Served] = []
        self._order = itertools.count()
        # (time, order, request) of arrivals, (time, order, -1 - worker) of ends of steps.
        self._events: list[tuple[float, int, int]] = []

    def run(self, tell: Callable[[int], None] = lambda done: None) -> Outcome:
        """Play the trace to its end; `tell` hears how many requests have arrived."""
        self.begin()
        self.advance(math.inf, tell)
        return self.outcome()

    def begin(self) -> None:
        """Lay out the arrivals."""
        self._events = [(at, next(self._order), number) for at, number in self._schedule.starts]
        heapq.heapify(self._events)

    def advance(self, until: float, tell: Callable[[int], None] = lambda done: None) -> bool:
        """Play on to a moment; return whether anything happens after it."""
        events = self._events
        while events and events[0][0] <= until:
            at, _, what = heapq.heappop(events)
            if what >= 0:
                self.now = at
                self._arrive(what)
                tell(len(self._served))
            else:
                worker = self._workers[-1 - what]
                if worker.ends_at == at:  # else it was cut short, and has ended already
                    self.now = at
                    self._end_step(worker)
        more = bool(events) or self._anybody_held()
        if more:
            self.now = until
        return more

    def outcome(self) -> Outcome:
        """What has become of all who have arrived."""
        return Outcome(self._served, self._workers, self._router.decisions)

    def _new_worker(self) -> SimulatedWorker:
        fleet, number = self._fleet, len(self._workers)
        width = len(str(fleet.workers - 1))
        worker = SimulatedWorker(
            f"w{number:0{width}d}",
            fleet.capacity_blocks,
            fleet.block_size,
            fleet.cost,
            self._read_clock,
            LONGEST_STRETCH_S * fleet.coarse,
        )
        self._workers.append(worker)
        self._by_id[worker.worker_id] = worker
        self._numbers[worker.worker_id] = number
        return worker

    def _read_clock(self) -> float:
        return self.now

    def _push(self, at: float, what: int) -> None:
        heapq.heappush(self._events, (at, next(self._order), what))

    def _await(self, worker: SimulatedWorker) -> None:
        if worker.ends_at is not None:
            self._push(worker.ends_at, -1 - self._numbers[worker.worker_id])

    def _arrive(self, number: int) -> None:
        request = self._trace.requests[number]
        served = Served(number, self.now, request.prompt_tokens, request.output_tokens)
        self._served.append(served)
        self._send(served)

    def _send(self, served: Served) -> None:
        number = served.number
        request, request_id = self._trace.requests[number], str(number)
        hashes = self._ids.prompt(request.prompt_tokens, list(request.spans()))
        keys = keys_of(hashes)
        self._tell_facts(keys)
        try:
            placement = self._router.place(request_id, request.prompt_tokens, keys, request.output_tokens)
        except InvalidRequest:
            served.refused = True
            self._go_on(number)
            return
        worker = self._by_id[placement.worker_id]
        total = request.prompt_tokens + request.output_tokens
        hashes += self._ids.answer(number, request.prompt_tokens, total)
        seq = sequence(request_id, request.prompt_tokens, request.output_tokens, hashes)
        served.worker_id, served.reachable_tokens = placement.worker_id, placement.reachable_tokens
        self._flights[request_id] = _Flight(served, seq, worker, keys)
        if self._facts is not None:
            self._facts.enter(worker.worker_id, keys)
        before = worker.ends_at
        worker.submit(seq)
        if worker.ends_at != before:
            self._await(worker)

    def _end_step(self, worker: SimulatedWorker) -> None:
        gained, changes = worker.finish()
        self._router.publish(worker.worker_id, changes)
        for seq in gained:
            self._take(seq)
        self._await(worker)

    def _take(self, seq: EngineSequence) -> None:
        """News of a request: its first token, or its end."""
        flight = self._flights[seq.request_id]
        if flight.served.first_token_at < 0:
            flight.served.first_token_at = self.now
            flight.served.cached_tokens = seq.cached_tokens or 0
            self._router.first_token(seq.request_id)
            self._answered(flight.served)
        if seq.finish_reason is not None:
            flight.served.finished_at = self.now
            del self._flights[seq.request_id]
            self._router.finish(seq.request_id)
            if self._facts is not None:
                self._facts.leave(flight.worker.worker_id, flight.keys)
            self._go_on(flight.served.number)

    def _anybody_held(self) -> bool:
        """Whether somebody waits for what is no event; nobody here does."""
        return False

    def _answered(self, served: Served) -> None:
        """A first token has come; nobody here minds."""

    def _go_on(self, number: int) -> None:
        """The next turn of a session comes after the reader has thought."""
        following = self._schedule.after.get(number)
        if following is not None:
            self._push(self.now + self._trace.requests[following].think_s, following)

    def _tell_facts(self, keys: tuple[BlockKey, ...]) -> None:
        if self._facts is None:
            return
        self._facts.arriving = keys
        for worker in self._workers:
            usage = worker.pool.usage()
            self._facts.waiting[worker.worker_id] = len(worker.scheduler.waiting)
            self._facts.used_share[worker.worker_id] = usage.live / usage.total
