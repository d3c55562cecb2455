"""The loop that turns requests into tokens: schedule, run, commit.

One thread owns scheduler, pool and model runner. Other threads hand in requests and cancellations through
a bounded-by-admission inbox, and receive each step's outputs through one callback.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvhive.proto.errors import ComputeError, KvhiveError, Overloaded, Unavailable
from kvhive.proto.index_schema import LoadReport
from kvhive.proto.kv_events import KvEvent
from kvhive.worker.block_desk import BlockDesk, PullOutcome
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.kept_out import MAX_KEPT_OUT_S
from kvhive.worker.model_runner import Chunk, ChunkResult, ModelRunner, TokenLogprobs
from kvhive.worker.scheduler import Scheduler
from kvhive.worker.sequence import FinishReason, Sequence
from kvhive.worker.step_plan import Scheduled
from kvhive.worker.step_time import StepTimeModel

log = logging.getLogger(__name__)

LEASE_POLL_S = 0.05
"""How often to look again while all that waits is waiting for blocks that a pin or a transfer holds."""


@dataclass(slots=True)  # made by the hundred in each step: frozen ones cost thrice
class Output:
    """News of one request: new tokens, the end, or the error that ended it. Plain values, safe to share."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    written_tokens: int = 0
    pinned_tokens: int = 0
    drafted: int = 0
    """Drafts verified for it so far; of those, `accepted` became output."""
    accepted: int = 0
    finish: FinishReason | None = None
    error: KvhiveError | None = None
    pulled_tokens: int = 0
    pins_refused: str = ""


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """What the engine calls, from its own thread, after every step."""

    deliver: Callable[[list[Output]], None]
    publish: Callable[[Iterable[KvEvent]], None]


class Engine:
    """Runs sequences to their end. `submit`, `cancel`, `clear_cache`, `look_at`, `load`, `stop`: from any
    thread."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, hooks: EngineHooks, clock: Callable[[], float]
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._manager = scheduler.manager
        self._hooks = hooks
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._over: KvhiveError | None = None
        self._refused: list[Output] = []
        self._untold: tuple[list[Scheduled], list[ChunkResult]] | None = None
        self._load = LoadReport()
        self._leaks = 0
        self._waits_for_moves = False
        self.desk = BlockDesk(scheduler, self._post)
        """What transfers of blocks speak to."""
        self.steps = 0
        self.step_time = StepTimeModel()

    def submit(self, seq: Sequence) -> None:
        """Hand in a request; its outputs follow through `deliver`, the last one with `finish` or `error`."""
        with self._wake:
            over = self._over
            if over is None:
                self._inbox.append(lambda: self._accept(seq))
                self._wake.notify()
        if over is not None:  # nobody takes in anything any more
            self._hooks.deliver([Output(seq.request_id, error=over)])

    def cancel(self, request_id: str) -> None:
        """Drop a request before the next step. Unknown and finished ids are ignored; nothing is delivered."""
        self._post(lambda: self._drop(request_id))

    def clear_cache(self, done: Callable[[int], None]) -> None:
        """Forget all cached blocks; `done` is called with their number, from the engine's thread.

        Who hears that finds it in `load`, and the index has been told.
        """

        def clear() -> None:
            count = self._manager.pool.clear()
            self._report()
            self._hooks.publish(self._manager.pool.drain_events())
            done(count)

        self._post(clear)

    def look_at(self, done: Callable[[BlockPool], None]) -> None:
        """Show `done` the pool between two steps, in the engine's thread."""
        self._post(lambda: done(self._manager.pool))

    @property
    def load(self) -> LoadReport:
        """Load and pool accounting as of the end of the last step."""
        return self._load

    def stop(self) -> None:
        """Make `run` return after the current step; requests still inside get Unavailable."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        """Work until `stop`. The engine's thread."""
        self._report()
        while self._wait_for_work():
            self.step()
        self.abandon(Unavailable("the worker is stopping"))

    def step(self) -> None:
        """Do one step: take in what was posted, schedule, run, commit, tell.

        On a device that computes by itself, a step is told while the next one runs; the last one at once.
        """
        self._take_in()
        plan = self._scheduler.schedule()
        self._give_up_kept_out()
        self._waits_for_moves = not plan and not self.desk.moves.idle
        results = self._timed_run([item.chunk for item in plan]) if plan else []
        self._scheduler.commit(plan, results)
        self._tell_rest()  # where nothing was launched meanwhile
        self._untold = plan, results
        if not self._runner.overlaps or not self._scheduler.running:
            self._tell_rest()

    def calibrate(self, token_counts: Iterable[int]) -> None:
        """Measure the step time of prefills and decodes before serving, in blocks that hold nothing yet.

        Counts that the model's context, the step budget or the pool do not allow are left out.
        """
        capacity = len(self._manager.pool.blocks) * self._manager.block_size
        longest = min(capacity, self._runner.shape.max_context, self._scheduler.limits.max_step_tokens)
        for count in token_counts:
            if count <= longest:
                blocks = list(range(self._manager.blocks_for(count)))
                self._timed_run([Chunk([0] * count, 0, blocks, None)])
                self._timed_run([Chunk([0], count - 1, blocks, None)])
        self._report()  # before anybody registers it: a router would believe in a pool of no blocks

    def abandon(self, error: KvhiveError) -> None:
        """Give every request inside `error`, after what it got before, and whoever comes yet at once.

        Told first: the pool may be broken.
        """
        with self._wake:
            self._over = error
        try:
            self._take_in()  # who came last is refused
            self._tell_rest()
        finally:
            refused, self._refused = self._refused, []
            failed = [Output(request_id, error=error) for request_id in self._sequences]
            self._hooks.deliver(refused + failed)
        sequences, self._sequences = self._sequences, {}
        for seq in sequences.values():
            self._scheduler.cancel(seq)
            self.desk.dropped(seq)
        self._report()

    def _take_in(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    def _wait_for_work(self) -> bool:
        with self._wake:
            blocked = self._scheduler.waits_for_leases or self._waits_for_moves
            if not self._stopping and not self._inbox and blocked and not self._scheduler.at_rest:
                self._wake.wait(LEASE_POLL_S)
            while not self._stopping and not self._inbox and self._scheduler.at_rest:
                self._wake.wait()
            return not self._stopping

    def _accept(self, seq: Sequence) -> None:
        try:
            if self._over is not None:
                raise self._over
            if seq.request_id in self._sequences:
                raise Unavailable(f"request {seq.request_id} is already running here")
            self._scheduler.add(seq)
        except KvhiveError as error:
            self._refused.append(Output(seq.request_id, error=error))
        else:
            self._sequences[seq.request_id] = seq
            self.desk.fetch_for(seq)

    def _give_up_kept_out(self) -> None:
        for seq in self._scheduler.kept_out.overdue():
            self._drop(seq.request_id)
            error = Overloaded(
                f"pinned blocks left no room for {len(seq.tokens)} tokens within {MAX_KEPT_OUT_S:g} s"
            )
            self._refused.append(Output(seq.request_id, error=error))

    def _drop(self, request_id: str) -> None:
        seq = self._sequences.pop(request_id, None)
        if seq is not None:
            self._scheduler.cancel(seq)
            self.desk.dropped(seq)

    def _timed_run(self, chunks: list[Chunk]) -> list[ChunkResult]:
        started = self._clock()
        wait = self._runner.launch(chunks)
        self._tell_rest()
        results = wait()
        tokens = pairs = 0
        for chunk, result in zip(chunks, results, strict=True):
            count = len(chunk.token_ids)
            tokens += count + result.drafted
            pairs += count * (chunk.start + (count + 1) // 2)
        self.step_time.observe(tokens, pairs, max(self._clock() - started, 1e-9))
        return results

    def _tell_rest(self) -> None:
        untold, self._untold = self._untold, None
        if untold is not None:
            self._tell(*untold)

    def _tell(self, plan: list[Scheduled], results: list[ChunkResult]) -> None:
        outputs, self._refused = self._refused, []
        for item, result in zip(plan, results, strict=True):
            seq = item.seq
            finish = seq.finish_reason
            if finish is FinishReason.CANCELLED:
                continue  # since the step that is told of
            if result.failed:
                error = result.reason or ComputeError("the model's logits are not finite")
                outputs.append(Output(seq.request_id, error=error))
            elif result.tokens or result.prompt_logprobs:
                outputs.append(
                    Output(  # by position: names would cost as much again
                        seq.request_id,
                        tuple(result.tokens),
                        tuple(result.logprobs),
                        tuple(result.prompt_logprobs),
                        seq.cached_tokens or 0,
                        seq.written_tokens,
                        seq.pinned_tokens or 0,
                        seq.drafted,
                        seq.accepted,
                        finish,
                        pulled_tokens=seq.pulled_tokens,
                        pins_refused=seq.pins_refused,
                    )
                )
            if finish is not None:
                self._sequences.pop(seq.request_id, None)
        self.steps += 1
        self._report()  # before the outputs: who sees a request end finds its blocks already accounted for
        if outputs:
            self._hooks.deliver(outputs)
        self._hooks.publish(self._manager.pool.drain_events())  # tokens are waited for, the index is advice

    def _report(self) -> None:
        usage = self._manager.pool.usage()
        if usage.live and self._scheduler.idle and self.desk.moves.idle:
            self._leaks += 1
            log.error("accounting: %d blocks are live while nothing runs (%d times)", usage.live, self._leaks)
        base, per_token, per_attention = self.step_time.coefficients
        scheduler, outcomes = self._scheduler, self.desk.outcomes
        forecast = scheduler.answers.forecast(scheduler.running, self._clock())
        latency_s, bytes_per_s = self.desk.rate.measured()
        low, high = scheduler.backlog(-1), scheduler.backlog(1)
        self._load = LoadReport(
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting.tokens,
            max_running=scheduler.limits.batch,
            queued_low_tokens=low.tokens,
            queued_high_tokens=high.tokens,
            waiting_low=low.sequences,
            waiting_high=high.sequences,
            blocks_total=usage.total,
            blocks_live=usage.live,
            blocks_cached=usage.cached,
            blocks_free=usage.free,
            blocks_pinned=self._manager.pool.leases.total,
            victim_reuse=self._manager.pool.reuse.share,
            answer_tokens=forecast.answer_tokens,
            growth_tokens=forecast.growth_tokens,
            release_tokens=forecast.release_tokens,
            step_base_s=base,
            step_per_token_s=per_token,
            step_per_attention_s=per_attention,
            max_step_tokens=scheduler.limits.max_step_tokens,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            admitted=scheduler.admitted,
            prefill_pairs=scheduler.prefill_pairs,
            preemptions=scheduler.preemptions,
            accounting_errors=self._leaks,
            drafted_tokens=scheduler.drafted,
            accepted_tokens=scheduler.accepted,
            block_bytes=self.desk.block_bytes,
            pull_latency_s=latency_s,
            pull_bytes_per_s=bytes_per_s,
            pulled_tokens=scheduler.pulled_tokens,
            pulls=outcomes[PullOutcome.PULLED] + outcomes[PullOutcome.SHORT],
            pull_fallbacks=outcomes.total() - outcomes[PullOutcome.PULLED] - outcomes[PullOutcome.SHORT],
        )
