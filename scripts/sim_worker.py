"""A simulated worker: the real scheduler, manager and pool on a cost model and a virtual clock.

Two things make it fast. Tokens have no content: a prompt's block hashes come from the trace, and only counts
are kept of the rest. And while all that runs decodes, nothing can change before the first of them ends, a
newcomer arrives or blocks run out: so many steps are one, computed by a sum (`CostModel.decodes_s`) and cut
off where a newcomer comes in. The engine's own loop would compute every one of them, and is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from kvhive.proto.block_hash import BlockHash, BlockKey
from kvhive.proto.index_schema import LoadReport
from kvhive.proto.kv_events import EventBatch, RemovalCause
from kvhive.scripts.sim_costs import CostModel
from kvhive.worker.answer_lengths import PoolForecast
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.model_runner import ChunkResult
from kvhive.worker.scheduler import Scheduler, SchedulerLimits
from kvhive.worker.sequence import SamplingParams, Sequence
from kvhive.worker.step_plan import Scheduled

LONGEST_STRETCH_S = 0.5
"""Decode steps taken as one last at most a heartbeat, so that reports stay as true as real ones."""

MAX_WAITING = 1 << 30
"""Nobody is refused: overload shows as waiting."""


class TokenCount:
    """Tokens without content: what a Sequence's list is asked for when all its hashes are known."""

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, which: slice) -> range:
        return range(self._count)[which]

    def append(self, token: int) -> None:
        """Count one more."""
        self._count += 1


def sequence(request_id: str, prompt_tokens: int, output_tokens: int, hashes: list[BlockHash]) -> Sequence:
    """Make a sequence without content. `hashes`: of all its full blocks, the answer's included."""
    tokens = cast("list[int]", TokenCount(prompt_tokens))
    return Sequence(request_id, tokens, prompt_tokens, SamplingParams(output_tokens), hashes=hashes)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What an engine reports at the end of a step."""

    at: float
    step: int
    queued: int
    running: int
    waiting: int
    waiting_tokens: int
    live: int
    cached: int
    free: int
    victim_reuse: float
    forecast: PoolForecast
    prefix_queries: int
    prefix_hits: int
    admitted: int
    prefill_pairs: int


class SimulatedWorker:
    """One worker. `clock` is the virtual time; whoever owns it calls `finish` when `ends_at` has come."""

    def __init__(
        self, worker_id: str, blocks: int, block_size: int, cost: CostModel, clock: Callable[[], float]
    ) -> None:
        self.worker_id = worker_id
        self.cost = cost
        self.pool = BlockPool(blocks)
        manager = KvCacheManager(self.pool, block_size, BlockHash(bytes(32)), clock)
        limits = SchedulerLimits(cost.max_step_tokens, cost.max_running, MAX_WAITING)
        self.scheduler = Scheduler(manager, limits)
        self.ends_at: float | None = None
        """When the step that runs now ends; None while idle."""
        self.busy_s = 0.0
        self.computed_tokens = 0
        self.evictions = 0
        self._manager = manager
        self._clock = clock
        self._plan: list[Scheduled] = []
        self._began = 0.0
        self._stretch = 1
        self._contexts = 0
        self._history: deque[_Snapshot] = deque()
        self._steps = 0
        self._note()

    def submit(self, seq: Sequence) -> None:
        """Take in a request; it waits for the end of the step that runs. Raises InvalidRequest."""
        self.scheduler.add(seq)
        if self.ends_at is None:
            self._begin()
        elif self._stretch > 1:
            self._cut(self._clock())

    def finish(self) -> tuple[list[Sequence], EventBatch]:
        """End the step, begin the next one. Return who gained tokens and how the cache changed."""
        now = self._clock()
        self.busy_s += now - self._began
        results = []
        for item in self._plan:
            seq = item.seq
            if self._stretch > 1:
                grown = self._manager.grow(seq, self._stretch)
                assert grown, f"{seq.request_id}: a stretch was planned for which there is no room"
                item.num_tokens = self._stretch
                results.append(ChunkResult(range(self._stretch)))
            else:
                reaches_end = seq.num_computed + item.num_tokens == len(seq.tokens)
                results.append(ChunkResult(range(1) if reaches_end else ()))
                self.computed_tokens += 0 if seq.prompt_ready else item.num_tokens
        self.scheduler.commit(self._plan, results)
        gained = [item.seq for item, result in zip(self._plan, results, strict=True) if result.tokens]
        self._steps += 1
        self._note()
        self._begin()
        return gained, self._changes()

    def report(self, at: float) -> LoadReport:
        """What the worker said of itself at a moment; the moments of calls must not go back."""
        then, cost = self._last(at), self.cost
        return LoadReport(
            queued_prefill_tokens=then.queued,
            running=then.running,
            waiting=then.waiting,
            waiting_tokens=then.waiting_tokens,
            max_running=self.scheduler.limits.batch,
            blocks_total=len(self.pool.blocks),
            blocks_live=then.live,
            blocks_cached=then.cached,
            blocks_free=then.free,
            answer_tokens=then.forecast.answer_tokens,
            growth_tokens=then.forecast.growth_tokens,
            release_tokens=then.forecast.release_tokens,
            victim_reuse=then.victim_reuse,
            step_base_s=cost.step_base_s,
            step_per_token_s=cost.per_token_s,
            step_per_attention_s=cost.per_attention_s,
            max_step_tokens=cost.max_step_tokens,
            prefix_queries=then.prefix_queries,
            prefix_hits=then.prefix_hits,
            admitted=then.admitted,
            prefill_pairs=then.prefill_pairs,
        )

    def last_step(self, at: float) -> int:
        """How many steps had ended at a moment; the moments of calls must not go back."""
        return self._last(at).step

    def _last(self, at: float) -> _Snapshot:
        history = self._history
        while len(history) > 1 and history[1].at <= at:
            history.popleft()
        return history[0]

    def _begin(self) -> None:
        plan = self._plan = self.scheduler.schedule()
        self._began, self._stretch = self._clock(), 1
        if not plan:
            self.ends_at = None
            return
        tokens = pairs = 0
        decoding = True
        for item in plan:
            start, count = item.seq.num_computed, item.num_tokens
            tokens += count
            pairs += count * (start + (count + 1) // 2)
            decoding = decoding and item.seq.prompt_ready and count == 1
        seconds = self.cost.step_s(tokens, pairs)
        # A plan without prompts means that no prompt can run: whoever waits, waits for blocks or a place.
        if decoding:
            self._contexts = pairs
            self._stretch = self._longest_stretch()
            seconds = self.cost.decodes_s(self._stretch, len(plan), pairs)
        self.ends_at = self._began + seconds

    def _longest_stretch(self) -> int:
        """Steps until the first sequence ends, blocks run out or LONGEST_STRETCH_S has passed."""
        steps = min(item.seq.max_total - len(item.seq.tokens) for item in self._plan)
        one = self.cost.decodes_s(1, len(self._plan), self._contexts)
        steps = max(1, min(steps, int(LONGEST_STRETCH_S / one)))
        blocks_for, available = self._manager.blocks_for, self.pool.available
        while steps > 1:
            missing = sum(
                blocks_for(item.seq.num_computed + steps) - len(item.seq.block_table) for item in self._plan
            )
            if missing <= available:
                break
            steps //= 2
        return steps

    def _cut(self, now: float) -> None:
        """End a stretch with the step that runs now."""
        cost, batch = self.cost, len(self._plan)
        low, high = 1, self._stretch
        while low < high:
            middle = (low + high) // 2
            if self._began + cost.decodes_s(middle, batch, self._contexts) >= now:
                high = middle
            else:
                low = middle + 1
        self._stretch = low
        self.ends_at = self._began + cost.decodes_s(low, batch, self._contexts)

    def _note(self) -> None:
        usage, scheduler = self.pool.usage(), self.scheduler
        self._history.append(
            _Snapshot(
                self._clock(),
                self._steps,
                scheduler.queued_prefill_tokens,
                len(scheduler.running),
                len(scheduler.waiting),
                scheduler.waiting.tokens,
                usage.live,
                usage.cached,
                usage.free,
                self.pool.reuse.share,
                scheduler.answers.forecast(scheduler.running, self._clock()),
                scheduler.prefix_queries,
                scheduler.prefix_hits,
                scheduler.admitted,
                scheduler.prefill_pairs,
            )
        )

    def _changes(self) -> EventBatch:
        """The net change of the cache since the last call: of each block the last event counts."""
        last = {event.key: event.cause for event in self.pool.drain_events()}
        stored = tuple(key for key, cause in last.items() if cause is None)
        removed = tuple(key for key, cause in last.items() if cause is not None)
        self.evictions += len(removed)
        return EventBatch(stored, {RemovalCause.EVICTED: removed} if removed else {})


def keys_of(hashes: list[BlockHash]) -> tuple[BlockKey, ...]:
    """The index keys of block hashes that are no longer than keys: they are their own."""
    return tuple(cast("list[BlockKey]", hashes))
