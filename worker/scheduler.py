"""Decides what the next step computes.

There is no prefill phase and no decode phase. Every running sequence has tokens whose KV is not computed
yet, exactly one of them while it decodes, and each step lets sequences catch up under one token budget:
first those with one token to go; then prompts, running or waiting to be admitted, all in the order of
waiting_queue.py; and what is left may go to drafts. No more sequences run than the budget has tokens, so a
decoding sequence is in every step: whatever its neighbours do, its next token waits for one step of at most
`max_step_tokens`, and the first of the prompts gets at least one token.

When blocks run out, the running sequence of the lowest priority, and of those the latest admitted, starts
over later. It comes back only when the pool has room until its end, and that room stays reserved; and nobody
is preempted more than MAX_PREEMPTIONS times. The two together are no contradiction: blocks can only run out
while somebody runs who was never preempted, since the needs of all others were set aside in full; or, where
pins leave no room for that, who may be preempted again.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass
from typing import TypeAlias

from kvhive.proto.admission import most_places
from kvhive.proto.errors import InvalidRequest, Overloaded
from kvhive.worker.answer_lengths import AnswerLengths
from kvhive.worker.fair_share import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, FairShare
from kvhive.worker.kept_out import KeptOut
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.model_runner import ChunkResult, TokenLogprobs
from kvhive.worker.sequence import FinishReason, Sequence, SequenceState
from kvhive.worker.step_plan import Scheduled
from kvhive.worker.waiting_queue import Backlog, Ranking, WaitingQueue, clamped_priority

DraftsFor: TypeAlias = Callable[[Sequence], int]
"""How many drafts to try for a sequence that decodes; room and budget may allow fewer."""

MAX_PREEMPTIONS = 3
"""Per sequence: what is computed again is lost, and whoever reads its stream sees it pause."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one worker's scheduler."""

    max_step_tokens: int
    max_running: int
    max_waiting: int

    @property
    def batch(self) -> int:
        """Sequences that may run at once: each has a token in every step while it decodes."""
        return min(self.max_running, self.max_step_tokens)


class Scheduler:
    """Waiting and running sequences of one engine. Not thread-safe: the engine's thread owns it.

    drafts_for: None tries no drafts
    """

    def __init__(
        self, manager: KvCacheManager, limits: SchedulerLimits, drafts_for: DraftsFor | None = None
    ) -> None:
        self.manager = manager
        self.limits = limits
        self._drafts_for = drafts_for
        self._shares = FairShare()
        self.answers = AnswerLengths()
        self.waiting = WaitingQueue()
        self.running: dict[Sequence, Scheduled] = {}  # in the order of admission
        self._prefilling: set[Sequence] = set()  # those of them with more than one token to compute
        self.kept_out = KeptOut(manager)
        self.cramped = False
        """Whether somebody could not be admitted in the last step for want of blocks."""
        self._tickets = self.preemptions = self.admitted = self.prefill_pairs = 0
        self.prefix_queries = self.prefix_hits = self.pulled_tokens = self.drafted = self.accepted = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    @property
    def at_rest(self) -> bool:
        """Whether there is nothing to do until somebody comes, or what is on its way has come."""
        return not self.running and self.waiting.at_rest

    @property
    def waits_for_leases(self) -> bool:
        """Whether nothing can run before the lease of a pin ends."""
        return bool(self.kept_out) and not self.running

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens of waiting and prefilling sequences whose KV is still to be computed."""
        return self.waiting.tokens + sum(seq.remaining for seq in self._prefilling)

    def backlog(self, sign: int) -> Backlog:
        """Return what waits, and what prefills lack, of the priorities above 0 (`sign` 1) or below (-1)."""
        return self.waiting.backlog(sign, self._prefilling)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises InvalidRequest if it can never fit, Overloaded if there is no place."""
        capacity, prompt = len(self.manager.pool.blocks) * self.manager.block_size, len(seq.tokens)
        if seq.max_total > capacity:
            raise InvalidRequest(
                "max_tokens",
                f"prompt ({prompt} tokens) and max_tokens ({seq.max_total - prompt}) need {seq.max_total} "
                f"tokens of KV, the worker's pool holds {capacity}",
            )
        waiting, limit = len(self.waiting), self.limits.max_waiting
        most = most_places(limit, seq.priority, self._shares.held_by(seq.tenant))
        most += max(0, self.limits.batch - len(self.running))  # those are admitted at once
        if waiting >= most and not seq.returns:  # its reader was promised the rest
            raise Overloaded(f"{waiting} requests are waiting, the limit is {limit}")
        seq.waiting_since = self.manager.clock()
        seq.ticket = self._tickets = self._tickets + 1
        self._shares.enter(seq.tenant)
        leader = seq.after
        if leader is not None and not leader.prompt_ready and self._has(leader):
            self.waiting.hold(seq, leader)
        else:
            self.waiting.append(seq)

    def cancel(self, seq: Sequence) -> None:
        """Forget a sequence and take its blocks back. A finished or unknown one is left alone."""
        if self._has(seq):
            self._finish(seq, FinishReason.CANCELLED)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step: decoding sequences, then prompts and newcomers, then drafts."""
        self.manager.pool.expire(self.manager.clock())
        plan: list[Scheduled] = []
        budget, preempted = self.limits.max_step_tokens, self.preemptions
        budget = self._decode(plan, budget)
        budget = self._prefill(plan, budget, admitting=preempted == self.preemptions)
        self.manager.pool.leases.renew(not self.kept_out.makes_room(), self.manager.clock())
        if self._drafts_for is not None:
            self._add_drafts(plan, budget, self._drafts_for)
        return plan

    def commit(self, plan: ReadOnly[Scheduled], results: ReadOnly[ChunkResult]) -> None:
        """Take in a step's results: append tokens, register what was computed, finish what is done.

        Cuts each result to what its sequence has gained by it.
        """
        for item, result in zip(plan, results, strict=True):
            self._advance(item, result)

    def _advance(self, item: Scheduled, result: ChunkResult) -> None:
        seq = item.seq
        if result.failed:  # nothing it computed in this step may be found by others
            return self._finish(seq, FinishReason.FAILED)
        if result.prompt_logprobs:
            result.prompt_logprobs = self._unreported(seq, result.prompt_logprobs)
        reason = self._append(seq, result)
        gained = len(result.tokens)
        cost = OUTPUT_TOKEN_COST * gained
        if not seq.prompt_ready:
            cost += self._prompt_cost(seq, item.num_tokens)
        self._shares.charge(seq.tenant, cost)
        seq.num_computed += item.num_tokens
        if result.drafted:
            # All but the last of the new tokens were drafts, and their KV is in the pool. That of rejected
            # drafts lies beyond num_computed: it is written over before anybody reads it.
            seq.num_computed += gained - 1
            self._count_drafts(seq, result.drafted, gained - 1)
        if self._prefilling and seq.remaining <= 1:
            self._prefilling.discard(seq)
        if seq.num_computed // self.manager.block_size > seq.registered:
            self.manager.commit(seq)
        if not seq.prompt_ready and seq.num_computed >= seq.prompt_tokens:
            seq.prompt_ready = True
            self.manager.pin(seq)
            self.waiting.release(seq)
        if reason is not None:
            self._finish(seq, reason)

    def _append(self, seq: Sequence, result: ChunkResult) -> FinishReason | None:
        """Append a step's tokens, cut at the first stop token, the grammar's end or the full length."""
        tokens, sampling, reason = seq.tokens, seq.sampling, None
        before = len(tokens)
        for token in result.tokens:
            tokens.append(token)
            length = len(tokens)
            late = length - seq.prompt_tokens > sampling.min_tokens
            if length - before == result.ends_at or (late and token in sampling.stop_token_ids):
                reason = FinishReason.STOP
            elif length >= seq.max_total:
                reason = FinishReason.LENGTH
            else:
                continue
            result.tokens = result.tokens[: length - before]
            result.logprobs = result.logprobs[: length - before]
            break
        return reason

    def _unreported(self, seq: Sequence, scored: ReadOnly[TokenLogprobs]) -> ReadOnly[TokenLogprobs]:
        """Of what this step says of the tokens after num_computed, what is prompt and was not told yet."""
        first = max(0, seq.prompt_scored - seq.num_computed)
        new = scored[first : max(0, seq.prompt_tokens - 1 - seq.num_computed)]
        if new:
            seq.prompt_scored = seq.num_computed + first + len(new)
        return new

    def _prompt_cost(self, seq: Sequence, computed: int) -> int:
        """Return what a tenant pays for its prompt's part of a step."""
        if seq.preemptions:  # that we compute it again is not the tenant's doing
            return 0
        return PROMPT_TOKEN_COST * min(computed, max(0, seq.prompt_tokens - seq.num_computed))

    def _count_drafts(self, seq: Sequence, drafted: int, accepted: int) -> None:
        seq.drafted += drafted
        seq.accepted += accepted
        self.drafted += drafted
        self.accepted += accepted

    def _decode(self, plan: list[Scheduled], budget: int) -> int:
        """Plan one token of every sequence that decodes; return what is left of the budget."""
        block_size = self.manager.block_size
        for seq, item in tuple(self.running.items()):
            computed = seq.num_computed
            if len(seq.tokens) - computed != 1:
                continue
            if budget and computed < len(seq.block_table) * block_size:  # whoever was preempted has no block
                item.plan(1)  # as _catch_up would
                plan.append(item)
                budget -= 1
            else:
                budget -= self._catch_up(seq, plan, budget)
        return budget

    def _catch_up(self, seq: Sequence, plan: list[Scheduled], budget: int) -> int:
        """Plan the next tokens of a running sequence; return what that takes from the budget."""
        if seq.state is not SequenceState.RUNNING or budget == 0:  # it may have been preempted just now
            return 0
        num_tokens = min(seq.remaining, budget)
        regained = self._make_room(seq, num_tokens, plan)
        if seq.state is not SequenceState.RUNNING:
            return -regained
        item = self.running[seq]
        item.plan(num_tokens)
        plan.append(item)
        return num_tokens - regained

    def _prefill(self, plan: list[Scheduled], budget: int, admitting: bool) -> int:
        """Share the budget among prompts, running and waiting ones; return what is left.

        Nobody overtakes a sequence that waits for blocks, unless only pins keep it out: that may take long.
        """
        admitting = admitting and bool(self.waiting) and len(self.running) < self.limits.batch
        self.cramped = False
        if not self._prefilling and not admitting:
            return budget
        ranking = self._ranking()
        prompts = sorted(self._prefilling, key=ranking.of, reverse=True)
        passed: list[Sequence] = []
        preempted = self.preemptions
        while budget:
            admitting = admitting and preempted == self.preemptions and len(self.running) < self.limits.batch
            newcomer = self.waiting.first(ranking) if admitting else None
            if newcomer and (not prompts or ranking.of(newcomer) < ranking.of(prompts[-1])):
                if self.manager.fits(newcomer, self._whole_need(newcomer), self.reserved_blocks()):
                    budget -= self._start(newcomer, plan, budget)
                else:
                    self.cramped = True
                    admitting = self._pass_over(newcomer, passed)
            elif prompts:
                budget -= self._catch_up(prompts.pop(), plan, budget)
            else:
                break
        for seq in reversed(passed):
            self.waiting.put_back(seq)
        return budget

    def _pass_over(self, seq: Sequence, passed: list[Sequence]) -> bool:
        """Take a sequence that does not fit out of the way, if only pins are in its way."""
        if not self.kept_out.note(seq, self._whole_need(seq)):
            return False
        self.waiting.remove(seq)
        passed.append(seq)
        return True

    def _ranking(self) -> Ranking:
        oldest = self.waiting.oldest()
        for seq in self._prefilling:
            level = clamped_priority(seq)
            oldest[level] = min(oldest.get(level, seq.waiting_since), seq.waiting_since)
        return Ranking(self.manager.clock(), oldest, self._shares)

    def _make_room(self, seq: Sequence, num_tokens: int, plan: list[Scheduled]) -> int:
        """Preempt until `seq` has blocks for `num_tokens` more; return the budget that comes back.

        `seq` itself may be the one to go.
        """
        if self.manager.grow(seq, num_tokens):
            return 0
        for other in self.running:  # what was got for drafts goes first; none are planned yet
            self.manager.trim(other)
        regained = 0
        while seq.state is SequenceState.RUNNING and not self.manager.grow(seq, num_tokens):
            victim = min(reversed(self.running), key=_worth_keeping)
            planned = self._preempt(victim)
            if planned in plan:
                plan.remove(planned)
                regained += planned.num_tokens
        return regained

    def _preempt(self, victim: Sequence) -> Scheduled:
        """Let a running sequence start over later; return what may have been planned of it."""
        planned = self._stop_running(victim)
        self.manager.release(victim)
        victim.state = SequenceState.WAITING
        victim.waiting_since = self.manager.clock()
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.put_back(victim)
        return planned

    def _stop_running(self, seq: Sequence) -> Scheduled:
        self._prefilling.discard(seq)
        return self.running.pop(seq)

    def _start(self, seq: Sequence, plan: list[Scheduled], budget: int) -> int:
        """Let a sequence run; return how many tokens this step computes of it."""
        self.kept_out.discard(seq)
        self.waiting.remove(seq)
        first_time = seq.cached_tokens is None
        self.manager.admit(seq)
        if first_time and seq.after is None:  # what is computed again after preemption is no hit
            self.prefix_queries += len(seq.tokens)
            self.prefix_hits += seq.cached_tokens or 0
            self.pulled_tokens += seq.pulled_tokens
            self.admitted += 1
            self.prefill_pairs += seq.remaining * (seq.num_computed + seq.remaining // 2)
        seq.state = SequenceState.RUNNING
        num_tokens = min(seq.remaining, budget)
        grown = self.manager.grow(seq, num_tokens)
        assert grown, f"{seq.request_id} was admitted into a pool that cannot hold it"
        item = self.running[seq] = Scheduled(seq, num_tokens)
        plan.append(item)
        if seq.remaining > 1:
            self._prefilling.add(seq)
        return num_tokens

    def _add_drafts(self, plan: list[Scheduled], budget: int, drafts_for: DraftsFor) -> None:
        """Give what is left of the budget to drafts, in blocks that nobody else is counting on."""
        spare = self.manager.pool.available - self.reserved_blocks()
        for item in plan:
            seq = item.seq
            if budget == 0 or spare < 0:
                return
            if seq.remaining > 1:
                continue
            own = self._still_needed(seq)
            room = (len(seq.block_table) + own + spare) * self.manager.block_size - len(seq.tokens)
            drafts = min(drafts_for(seq), budget, room, seq.max_total - len(seq.tokens) - 1)
            if drafts > 0 and self.manager.grow(seq, 1 + drafts):
                spare = self.manager.pool.available - self.reserved_blocks()
                item.chunk.max_drafts = drafts
                budget -= drafts

    def _whole_need(self, seq: Sequence) -> int:
        # A newcomer needs room for its prompt and a first token. One that was preempted comes back only
        # when it can run to its end, or it would be preempted again for the same lack of blocks; as long as
        # it may be, all that pins leave is enough.
        need = len(seq.tokens) + 1
        if 0 < seq.preemptions < MAX_PREEMPTIONS:
            return min(seq.max_total, max(need, self.manager.tokens_beside_pins))
        return seq.max_total if seq.preemptions else need

    def _still_needed(self, seq: Sequence) -> int:
        """Blocks that a running sequence does not have yet of what it was admitted with."""
        return max(0, self.manager.blocks_for(self._whole_need(seq)) - len(seq.block_table))

    def reserved_blocks(self) -> int:
        """Blocks that nobody has yet, and that running sequences were promised."""
        return sum(self._still_needed(seq) for seq in self.running)

    def _has(self, seq: Sequence) -> bool:
        return seq.state is SequenceState.RUNNING or seq in self.waiting

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.state is SequenceState.RUNNING:
            self._stop_running(seq)
        else:
            self.waiting.remove(seq)
            self.kept_out.discard(seq)
        if seq.prompt_ready:
            self.answers.add(len(seq.tokens) - seq.prompt_tokens)
        self._shares.leave(seq.tenant)
        self.manager.release(seq)
        seq.state = SequenceState.FINISHED
        seq.finish_reason = reason
        self.waiting.release(seq)


def _worth_keeping(seq: Sequence) -> tuple[bool, int]:
    return seq.preemptions >= MAX_PREEMPTIONS, clamped_priority(seq)
