"""Decides what the next step computes.

There is no prefill phase and no decode phase. Every running sequence has tokens whose KV is not computed
yet, exactly one of them while it decodes, and each step lets sequences catch up under one token budget:
first those with one token to go, so that a long prompt delays a decoding neighbour by at most one step of
`max_step_tokens`; then the rest, first come, first served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass

from kvhive.proto.errors import InvalidRequest, Overloaded
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.model_runner import Chunk, ChunkResult, TokenLogprobs
from kvhive.worker.sequence import FinishReason, Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one worker's scheduler."""

    max_step_tokens: int
    max_running: int
    max_waiting: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's share of one step: its next `num_tokens` tokens."""

    seq: Sequence
    num_tokens: int
    max_drafts: int = 0

    def chunk(self) -> Chunk:
        """What the model runner must know."""
        seq, sampling = self.seq, self.seq.sampling
        start, end = seq.num_computed, seq.num_computed + self.num_tokens
        last = end == len(seq.tokens)
        wants_prompt = sampling.prompt_logprobs is not None and start < seq.prompt_tokens
        return Chunk(
            token_ids=seq.tokens[start:end],
            start=start,
            block_table=seq.block_table,
            sampling=sampling if last else None,
            history=seq.tokens if last else (),
            prompt_tokens=seq.prompt_tokens,
            max_drafts=self.max_drafts,
            prompt_logprobs=sampling.prompt_logprobs if wants_prompt else None,
            next_prompt_token=seq.tokens[end] if wants_prompt and end < seq.prompt_tokens else None,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did for one sequence: the tokens it gained, none while its prompt is being computed."""

    seq: Sequence
    tokens: ReadOnly[int] = ()
    logprobs: ReadOnly[TokenLogprobs] = ()
    prompt_logprobs: ReadOnly[TokenLogprobs] = ()


class Scheduler:
    """Waiting and running sequences of one engine. Not thread-safe: the engine's thread owns it."""

    def __init__(self, manager: KvCacheManager, limits: SchedulerLimits) -> None:
        self.manager = manager
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens of waiting and prefilling sequences whose KV is still to be computed."""
        prefilling = sum(seq.remaining for seq in self.running if seq.remaining > 1)
        return prefilling + sum(len(seq.tokens) for seq in self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises InvalidRequest if it can never fit, Overloaded if the queue is full."""
        capacity = len(self.manager.pool.blocks) * self.manager.block_size
        if seq.max_total > capacity:
            raise InvalidRequest(
                "max_tokens",
                f"prompt ({len(seq.tokens)} tokens) and max_tokens ({seq.max_total - len(seq.tokens)}) need "
                f"{seq.max_total} tokens of KV, the worker's pool holds {capacity}",
            )
        free_slots = max(0, self.limits.max_running - len(self.running))  # those are admitted at once
        if len(self.waiting) >= self.limits.max_waiting + free_slots:
            raise Overloaded(
                f"{len(self.waiting)} requests are waiting, the limit is {self.limits.max_waiting}"
            )
        self.waiting.append(seq)

    def cancel(self, seq: Sequence) -> None:
        """Forget a sequence and take its blocks back. A finished or unknown one is left alone."""
        if seq.state is not SequenceState.FINISHED:
            self._finish(seq, FinishReason.CANCELLED)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step: running sequences catch up, then waiting ones are admitted."""
        plan: dict[str, Scheduled] = {}
        budget = self.limits.max_step_tokens
        preempted = self.preemptions
        for seq in sorted(self.running, key=lambda s: s.remaining > 1):  # stable: decodes first, then FCFS
            if seq.state is not SequenceState.RUNNING or budget == 0:
                continue
            num_tokens = min(seq.remaining, budget)
            budget += self._make_room(seq, num_tokens, plan)
            if seq.state is SequenceState.RUNNING:
                plan[seq.request_id] = Scheduled(seq, num_tokens)
                budget -= num_tokens
        if preempted == self.preemptions:
            self._admit(plan, budget)
        return list(plan.values())

    def commit(self, plan: ReadOnly[Scheduled], results: ReadOnly[ChunkResult]) -> list[Progress]:
        """Take in a step's results: append tokens, register what was computed, finish what is done."""
        return [self._advance(item, result) for item, result in zip(plan, results, strict=True)]

    def _advance(self, item: Scheduled, result: ChunkResult) -> Progress:
        seq = item.seq
        if result.failed:  # nothing it computed in this step may be found by others
            self._finish(seq, FinishReason.FAILED)
            return Progress(seq)
        kept, reason = self._kept(seq, result.tokens)
        seq.tokens.extend(kept)
        # All but the last of the new tokens were drafts, and their KV is in the pool.
        seq.num_computed += item.num_tokens + max(0, len(kept) - 1)
        self.manager.commit(seq)
        if reason is not None:
            self._finish(seq, reason)
        return Progress(seq, kept, result.logprobs[: len(kept)], result.prompt_logprobs)

    def _kept(self, seq: Sequence, tokens: ReadOnly[int]) -> tuple[ReadOnly[int], FinishReason | None]:
        """Cut new tokens at the first stop token or at the sequence's full length."""
        for index, token in enumerate(tokens):
            if token in seq.sampling.stop_token_ids:
                return tokens[: index + 1], FinishReason.STOP
            if len(seq.tokens) + index + 1 >= seq.max_total:
                return tokens[: index + 1], FinishReason.LENGTH
        return tokens, None

    def _make_room(self, seq: Sequence, num_tokens: int, plan: dict[str, Scheduled]) -> int:
        """Preempt the latest admitted sequences until `seq` fits; return the budget they give back.

        `seq` itself may be the latest, and then it is preempted.
        """
        regained = 0
        while seq.state is SequenceState.RUNNING and not self.manager.grow(seq, num_tokens):
            victim = self.running.pop()
            planned = plan.pop(victim.request_id, None)
            regained += planned.num_tokens if planned else 0
            self.manager.release(victim)
            victim.state = SequenceState.WAITING
            victim.preemptions += 1
            self.preemptions += 1
            self.waiting.appendleft(victim)
        return regained

    def _admit(self, plan: dict[str, Scheduled], budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.limits.max_running:
            seq = self.waiting[0]
            if not self.manager.fits(seq, self._whole_need(seq), self._reserved()):
                return  # first come, first served: nobody overtakes a request that waits for blocks
            self.waiting.popleft()
            first_time = seq.cached_tokens is None
            self.manager.admit(seq)
            if first_time:
                self.prefix_queries += len(seq.tokens)
                self.prefix_hits += seq.num_computed
            seq.state = SequenceState.RUNNING
            self.running.append(seq)
            num_tokens = min(seq.remaining, budget)
            grown = self.manager.grow(seq, num_tokens)
            assert grown, f"{seq.request_id} was admitted into a pool that cannot hold it"
            plan[seq.request_id] = Scheduled(seq, num_tokens)
            budget -= num_tokens

    def _whole_need(self, seq: Sequence) -> int:
        # A newcomer needs room for its prompt and a first token. One that was preempted comes back only
        # when it can run to its end, or it would be preempted again for the same lack of blocks.
        return seq.max_total if seq.preemptions else len(seq.tokens) + 1

    def _reserved(self) -> int:
        """Blocks that admitted sequences still need to finish what they have, so that nobody takes them."""
        return sum(
            max(0, self.manager.blocks_for(len(seq.tokens) + 1) - len(seq.block_table))
            for seq in self.running
        )

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.state is SequenceState.RUNNING:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.manager.release(seq)
        seq.state = SequenceState.FINISHED
        seq.finish_reason = reason
