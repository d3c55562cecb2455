"""Runs requests: prepare, place, stream, and go on elsewhere when a worker is lost.

The Frontend that both doors ask. A stream that loses its worker continues on the next best one from the
prompt and the tokens it already has; noise depends only on seed and position, so nothing is lost or doubled.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from kvhive.proto.errors import InvalidRequest, NotNow, Overloaded, TimedOut, Unavailable
from kvhive.router.admission import Admission
from kvhive.router.chat.tools.by_name import AUTO, tool_form
from kvhive.router.chat.tools.tool_use import ToolReading, ToolUse
from kvhive.router.choice_output import ChoiceOutput
from kvhive.router.decision_ledger import DecisionLedger
from kvhive.router.dispatch_counters import DispatchCounters
from kvhive.router.field_checks import check_token_ids
from kvhive.router.frontend import Delta, GenerationEvent, ModelInfo, Started, TokenPiece, Usage
from kvhive.router.generation import Choice, Generation
from kvhive.router.grammar import GrammarCheck
from kvhive.router.held_requests import RETRY_S, HeldRequests, Waiting
from kvhive.router.merged_streams import merged
from kvhive.router.output_text import OutputText
from kvhive.router.patience import Patience
from kvhive.router.pins import asked_pins
from kvhive.router.placement import NobodyServes, Placement, Placer, PullSource, RoutingState, Terms, TooLate
from kvhive.router.prewarm import Run, prewarmed
from kvhive.router.prompt import PromptPreparer
from kvhive.router.request import (
    GenerateRequest,
    Prompt,
    check_prompt_length,
    resolve_max_tokens,
    validate_request,
)
from kvhive.router.retry_after import retry_after_s
from kvhive.router.token_piece import token_piece
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.worker_client import WorkerBusy, WorkerClient, WorkerLost
from kvhive.router.worker_requests import worker_requests

log = logging.getLogger(__name__)

MAX_PASSES = 3
"""Full workers that one request tries before it is refused: more would only add to what they refuse."""

DRAINED_SHARE = 0.125
"""A full queue is worth another try when so much of it is gone."""


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of one router."""

    max_concurrent: int
    max_failovers: int
    queue_timeout_s: float
    max_predicted_ttft_s: float = 0.0
    max_held: int = 0
    hold_s: float = 0.0
    ttft_goal_s: float = math.inf
    """What first tokens are counted by; it limits nothing."""
    min_pinned_tokens: int = 0


class Dispatcher:
    """See Frontend. One per router process."""

    def __init__(
        self,
        model: ModelInfo,
        text: tuple[TextTokenizer, PromptPreparer],
        routing: tuple[RoutingState, Placer],
        workers: WorkerClient,
        limits: DispatchLimits,
        clock: Callable[[], float],
        tool_format: str = AUTO,
    ) -> None:
        """Put it together. Raises ConfigError when there is no `tool_format` of this name."""
        self._model = model
        self._tokenizer, self._preparer = text
        self._state, self._placer = routing
        self._workers = workers
        self._limits = limits
        self._clock = clock
        self._admission = Admission(limits.max_concurrent, clock)
        self._grammars = GrammarCheck(self._tokenizer)
        form = tool_form(tool_format, self._tokenizer.chat_template, self._tokenizer.has_token)
        self._tool_use = ToolUse(form, self._tokenizer, self._grammars.check)
        self._held = HeldRequests(limits.max_held, limits.hold_s, self._may_place)
        self.counters = DispatchCounters()
        self.ledger = DecisionLedger(self._placer.block_size, clock)

    @property
    def in_flight(self) -> int:
        """Requests that are not over."""
        return self._admission.in_flight

    @property
    def held(self) -> int:
        """Of those, the ones that wait for a worker to serve."""
        return len(self._held)

    def models(self) -> list[ModelInfo]:
        """See Frontend."""
        return [self._model]

    def token_piece(self, token_id: int) -> TokenPiece:
        """See Frontend."""
        return token_piece(self._tokenizer, token_id)

    def ready(self) -> bool:
        """See Frontend."""
        return bool(self._state.registry.routable(self._clock()))

    async def tokenize(self, prompt: Prompt, model: str = "", cache_salt: str = "") -> list[int]:
        """Return the token ids that `generate` would compute. Raises InvalidRequest, Overloaded."""
        asked = GenerateRequest(prompt, model=model, cache_salt=cache_salt)
        validate_request(asked, self._model.vocab_size, self._model.max_context)
        self._check_model(model)
        with self._admission.admitted():
            return await self._preparer.tokenize(prompt, cache_salt)

    async def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """See TokenizingFrontend."""
        self._check_model(model)
        check_token_ids("tokens", token_ids, self._model.vocab_size)
        with self._admission.admitted():
            return await self._preparer.detokenize(token_ids)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See Frontend."""
        arrived, begun = self._clock(), False
        try:
            with self._admission.admitted(request.tenant, request.priority):
                generation = await self._prepare(request, arrived)
                answers = self._preparer.answers(generation.request, generation.prompt)
                async with aclosing(self._run(generation)) as events:
                    async for event in events:
                        begun = begun or isinstance(event, Delta)
                        if answers is not None:
                            answers.take(event)
                        yield event
        except NotNow as error:
            if not begun:
                self.counters.first_token(math.inf, self._limits.ttft_goal_s)
            if error.retry_after_s is not None:
                error.retry_after_s = retry_after_s(error.retry_after_s, random.random())
            raise

    async def prewarm(self, request: GenerateRequest, workers: int) -> list[Usage]:
        """See TokenizingFrontend."""
        with self._admission.admitted(request.tenant, request.priority):
            return await prewarmed(request, workers, self._begin)

    async def _begin(self, request: GenerateRequest, avoid: set[str], pull_from: str) -> Run:
        generation = await self._prepare(request, self._clock())
        generation.avoid |= avoid
        generation.may_wait = False
        generation.pull_from = self._holder(pull_from, len(generation.prompt.keys))
        return self._run(generation)

    def _holder(self, worker_id: str, blocks: int) -> PullSource | None:
        """Name a worker as the source of blocks that it has just computed, where blocks move."""
        for view in self._state.registry.routable(self._clock()):
            record = view.record
            if record.worker_id == worker_id and record.load.block_bytes and blocks:
                return PullSource(worker_id, record.address, record.epoch, blocks)
        return None

    async def _prepare(self, request: GenerateRequest, arrived: float) -> Generation:
        model = self._model
        validate_request(request, model.vocab_size, model.max_context)
        self._check_model(request.model)
        request, reading = await self._tool_use.prepare(request)
        if request.sampling.grammar is not None:
            await self._grammars.check(request.sampling.grammar)
        prompt = await self._preparer.prepare(request)
        check_prompt_length("prompt", len(prompt.token_ids), model.max_context)
        await self._state.index.prepare(prompt.keys)
        sampling = request.sampling
        ends = () if sampling.ignore_eos else self._tokenizer.eos_token_ids
        wire_id = f"req-{secrets.token_hex(12)}"
        return Generation(
            request=request,
            request_id=request.request_id or wire_id,
            wire_id=wire_id,
            prompt=prompt,
            max_tokens=resolve_max_tokens(len(prompt.token_ids), sampling, model.max_context),
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            choices=[Choice(i, self._output(request, reading)) for i in range(request.n)],
            stop_token_ids=sorted({*ends, *sampling.stop_token_ids}),
            arrived=arrived,
            waiting_since=arrived,
            pins=asked_pins(prompt.pins, self._placer.block_size, self._limits.min_pinned_tokens),
        )

    def _output(self, request: GenerateRequest, reading: ToolReading | None) -> ChoiceOutput:
        sampling = request.sampling
        shown, parser = (None, None) if reading is None else (reading.shown, reading.parser())
        return ChoiceOutput(OutputText(self._tokenizer, sampling.stop, sampling.min_tokens, shown), parser)

    async def _run(self, generation: Generation) -> AsyncGenerator[GenerationEvent, None]:
        """Place and stream until it is done, going on elsewhere when a worker is lost or full."""
        try:
            placement = await self._place(generation)
            prompt_tokens = len(generation.prompt.token_ids)
            yield Started(
                generation.request_id, placement.worker_id, prompt_tokens, placement.predicted_ttft_s
            )
            while True:
                try:
                    async with aclosing(self._stream(generation, placement)) as events:
                        async for event in events:
                            yield event
                    return
                except WorkerBusy as error:
                    placement = self._pass_on(generation, placement, error)
                except WorkerLost as error:
                    placement = await self._move(generation, placement, error)
                except TimedOut as error:
                    raise self._patience(generation).over(self._clock(), placement.worker_id) from error
        finally:
            self._state.loads.finish(generation.wire_id, self._clock())

    async def _place(self, generation: Generation) -> Placement:
        """Choose a worker; where there is none, wait for one as long as that is allowed."""
        hold_s = self._limits.hold_s if generation.may_wait else 0.0
        hold_until = self._clock() + hold_s
        while True:
            try:
                return self._place_now(generation)
            except NobodyServes as error:
                if not hold_s:
                    error.cause, error.retry_after_s = "no_worker", RETRY_S
                    raise
                await self._hold(generation, hold_until)

    def _place_now(self, generation: Generation) -> Placement:
        request, patience, now = generation.request, self._patience(generation), self._clock()
        pool = self._largest_pool()
        if request.sampling.max_tokens is None and generation.untouched and pool:
            # The caller named no number: what every pool can hold is meant.
            room = max(1, request.sampling.min_tokens, pool - len(generation.prompt.token_ids))
            generation.max_tokens = min(generation.max_tokens, room)
        if patience.left_s(now) <= 0.0:
            raise patience.over(now, "")
        # Who has been let in is not refused for what is predicted when its worker was lost, or out of room.
        let_in = generation.failovers or not generation.untouched
        within_s = math.inf if let_in else patience.predicted_within_s(now)
        terms = Terms(request.priority, within_s)
        try:
            placement = self._placer.place(
                generation.wire_id, generation.prompt, generation.max_tokens, generation.avoid, terms
            )
        except TooLate as error:
            raise Overloaded(
                f"{error} ({patience.bound(now)})", cause=error.cause, retry_after_s=error.retry_after_s
            ) from error
        if generation.pull_from is not None:
            placement = replace(placement, source=generation.pull_from)
        generation.decision = self.ledger.note(
            generation.request_id,
            request.tenant,
            len(generation.prompt.token_ids),
            placement,
            generation.failovers + generation.passes,
        )
        return placement

    async def _hold(self, generation: Generation, until: float) -> None:
        """Wait until somebody serves; those that it had may be tried again then."""
        request, patience, now = generation.request, self._patience(generation), self._clock()
        promised = generation.held or generation.failovers > 0
        waiting = Waiting(request.tenant, request.priority, generation.arrived, promised)
        self.counters.held += not generation.held
        generation.held = True
        if not await self._held.wait(waiting, min(until - now, patience.left_s(now))):
            if patience.left_s(now) <= until - now:
                raise patience.over(self._clock(), "")
            raise Unavailable(
                f"no worker has served for {self._limits.hold_s:g} s, the longest that a request is held",
                cause="no_worker",
                retry_after_s=RETRY_S,
            )
        generation.avoid.clear()

    def _patience(self, generation: Generation) -> Patience:
        limits, timeout_s = self._limits, generation.request.timeout_s
        return Patience(
            since=generation.waiting_since,
            queue_timeout_s=limits.queue_timeout_s or math.inf,
            deadline=math.inf if timeout_s is None else generation.arrived + timeout_s,
            max_predicted_s=limits.max_predicted_ttft_s or math.inf,
        )

    def _pass_on(self, generation: Generation, placement: Placement, error: WorkerBusy) -> Placement:
        """Try another worker when one's queue is full, which is no fault of its. Raises Overloaded."""
        self._leave(generation, placement)
        self.counters.passes += 1
        generation.passes += 1
        full = Overloaded(
            f"every worker that was tried is full: {error}",
            cause="queues_full",
            retry_after_s=placement.predicted_ttft_s * DRAINED_SHARE,
        )
        if generation.passes > MAX_PASSES:
            raise full from error
        try:
            return self._place_now(generation)
        except Unavailable:
            raise full from error

    async def _move(self, generation: Generation, placement: Placement, error: WorkerLost) -> Placement:
        """Take a lost worker out and choose the next. Raises Unavailable when the failovers are used up.

        Those of them that drained do not count: nothing was wrong, and however many go, no stream ends.
        """
        log.warning(
            "worker lost request_id=%s worker_id=%s epoch=%d cause=%s: %s",
            generation.request_id,
            placement.worker_id,
            placement.epoch,
            error.cause,
            error,
        )
        self._leave(generation, placement)
        registry = self._state.registry
        registry.report_failure(placement.worker_id, placement.epoch)
        generation.failovers += 1
        generation.retired += registry.is_draining(placement.worker_id, placement.epoch)
        lost = generation.failovers - generation.retired
        if lost > self._limits.max_failovers:
            raise Unavailable(
                f"the stream lost {lost} workers, the limit is {self._limits.max_failovers}",
                cause="failovers",
                retry_after_s=RETRY_S,
            ) from error
        try:
            moved = await self._place(generation)
        except Unavailable as nobody:
            raise Unavailable(
                f"worker {placement.worker_id} was lost and {nobody}",
                cause=nobody.cause,
                retry_after_s=nobody.retry_after_s,
            ) from error
        self.counters.failovers[error.cause] += 1
        return moved

    def _leave(self, generation: Generation, placement: Placement) -> None:
        self._state.loads.finish(generation.wire_id, self._clock())
        self._state.predicted.forget(placement.worker_id, generation.prompt.keys)
        generation.moved(self._clock())
        generation.avoid.add(placement.worker_id)

    async def _stream(
        self, generation: Generation, placement: Placement
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Stream from one worker to the end. Raises WorkerLost with what arrived kept in the generation."""
        left_s = self._patience(generation).left_s(self._clock())
        requests = worker_requests(generation, placement, 0.0 if left_s == math.inf else max(left_s, 0.001))
        begun = False
        streams = [self._workers.generate(placement.address, request) for request in requests]
        async with aclosing(merged(streams)) as messages:
            async for index, message in messages:
                if not begun and message.updates:
                    begun = True
                    if generation.untouched:
                        after_s = self._clock() - generation.arrived
                        self.counters.first_token(after_s, self._limits.ttft_goal_s)
                    self._state.loads.first_token(generation.wire_id, self._clock())
                    self._state.registry.report_success(placement.worker_id, placement.epoch)
                for event in generation.take(message, placement):
                    yield event
                if generation.ended:
                    return
                cut = generation.take_cut()
                if cut:  # by a stop string, of which the worker knows nothing
                    await self._workers.stop_choices(placement.address, requests[index].request_id, cut)
        raise WorkerLost(f"worker {placement.worker_id} ended the stream too early", "early_end")

    def _check_model(self, name: str) -> None:
        if name not in ("", self._model.name):
            raise InvalidRequest("model", f"must be {self._model.name!r}, is {name[:100]!r}")

    def _may_place(self) -> bool:
        return self.ready() and self._largest_pool() > 0

    def _largest_pool(self) -> int:
        views = self._state.registry.serving()
        return max((v.record.load.blocks_total * v.record.block_size for v in views), default=0)
