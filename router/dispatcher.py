"""Runs requests: prepare, place, stream, and go on elsewhere when a worker is lost.

The Frontend that both doors ask. A stream that loses its worker continues on the next best one from the
prompt and the tokens it already has; noise depends only on seed and position, so nothing is lost or doubled.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from kvhive.proto.errors import InvalidRequest, Overloaded, Unavailable
from kvhive.router.frontend import GenerationEvent, ModelInfo, Started, TokenPiece, Usage
from kvhive.router.generation import Choice, Generation
from kvhive.router.merged_streams import merged
from kvhive.router.output_text import OutputText
from kvhive.router.placement import Placement, Placer, PullSource, RoutingState
from kvhive.router.prewarm import Run, prewarmed
from kvhive.router.prompt import PromptPreparer
from kvhive.router.request import (
    GenerateRequest,
    Prompt,
    check_prompt_length,
    resolve_max_tokens,
    validate_request,
)
from kvhive.router.token_piece import token_piece
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.worker_client import WorkerBusy, WorkerClient, WorkerLost
from kvhive.router.worker_requests import worker_requests

log = logging.getLogger(__name__)

MAX_PASSES = 3
"""Full workers that one request tries before it is refused: more would only add to what they refuse."""


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of one router."""

    max_concurrent: int
    max_failovers: int
    queue_timeout_s: float


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
    ) -> None:
        self._model = model
        self._tokenizer, self._preparer = text
        self._state, self._placer = routing
        self._workers = workers
        self._limits = limits
        self._clock = clock
        self._in_flight = 0

    def models(self) -> list[ModelInfo]:
        """See Frontend."""
        return [self._model]

    def token_piece(self, token_id: int) -> TokenPiece:
        """See Frontend."""
        return token_piece(self._tokenizer, token_id)

    def ready(self) -> bool:
        """See Frontend."""
        return bool(self._state.registry.routable(self._clock()))

    async def tokenize(self, prompt: Prompt, model: str = "") -> list[int]:
        """Return the token ids that `generate` would compute. Raises InvalidRequest, Overloaded."""
        validate_request(
            GenerateRequest(prompt, model=model), self._model.vocab_size, self._model.max_context
        )
        self._check_model(model)
        with self._admitted():
            return await self._preparer.tokenize(prompt)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See Frontend."""
        with self._admitted():
            generation = await self._prepare(request)
            async with aclosing(self._run(generation)) as events:
                async for event in events:
                    yield event

    async def prewarm(self, request: GenerateRequest, workers: int) -> list[Usage]:
        """See TokenizingFrontend."""
        with self._admitted():
            return await prewarmed(request, workers, self._begin)

    async def _begin(self, request: GenerateRequest, avoid: set[str], pull_from: str) -> Run:
        generation = await self._prepare(request)
        generation.avoid |= avoid
        generation.pull_from = self._holder(pull_from, len(generation.prompt.keys))
        return self._run(generation)

    def _holder(self, worker_id: str, blocks: int) -> PullSource | None:
        """Name a worker as the source of blocks that it has just computed, where blocks move."""
        for view in self._state.registry.routable(self._clock()):
            record = view.record
            if record.worker_id == worker_id and record.load.block_bytes and blocks:
                return PullSource(worker_id, record.address, record.epoch, blocks)
        return None

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Count a request in flight. Raises Overloaded at the limit."""
        if self._in_flight >= self._limits.max_concurrent:
            raise Overloaded(
                f"{self._in_flight} requests are in flight, the limit is {self._limits.max_concurrent}"
            )
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def _prepare(self, request: GenerateRequest) -> Generation:
        model = self._model
        validate_request(request, model.vocab_size, model.max_context)
        self._check_model(request.model)
        prompt = await self._preparer.prepare(request)
        check_prompt_length("prompt", len(prompt.token_ids), model.max_context)
        await self._state.index.prepare(prompt.keys)
        sampling = request.sampling
        max_tokens = resolve_max_tokens(len(prompt.token_ids), sampling, model.max_context)
        if sampling.max_tokens is None:  # the caller named no number: what every pool can hold is meant
            pool = self._largest_pool()
            if pool:  # else nobody serves, or has said how large its own is: placing will say so
                room = pool - len(prompt.token_ids)
                max_tokens = max(1, sampling.min_tokens, min(max_tokens, room))
        ends = () if sampling.ignore_eos else self._tokenizer.eos_token_ids
        wire_id = f"req-{secrets.token_hex(12)}"
        return Generation(
            request=request,
            request_id=request.request_id or wire_id,
            wire_id=wire_id,
            prompt=prompt,
            max_tokens=max_tokens,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            choices=[
                Choice(i, OutputText(self._tokenizer, sampling.stop, sampling.min_tokens))
                for i in range(request.n)
            ],
            stop_token_ids=sorted({*ends, *sampling.stop_token_ids}),
        )

    async def _run(self, generation: Generation) -> AsyncGenerator[GenerationEvent, None]:
        """Place and stream until it is done, going on elsewhere when a worker is lost or full."""
        try:
            placement = self._place(generation)
            yield Started(generation.request_id, placement.worker_id, len(generation.prompt.token_ids))
            while True:
                try:
                    async with aclosing(self._stream(generation, placement)) as events:
                        async for event in events:
                            yield event
                    return
                except WorkerBusy as error:
                    placement = self._pass_on(generation, placement, error)
                except WorkerLost as error:
                    placement = self._move(generation, placement, error)
        finally:
            self._state.loads.finish(generation.wire_id, self._clock())

    def _place(self, generation: Generation) -> Placement:
        placement = self._placer.place(
            generation.wire_id, generation.prompt, generation.max_tokens, generation.avoid
        )
        if generation.pull_from is None:
            return placement
        return replace(placement, source=generation.pull_from)

    def _pass_on(self, generation: Generation, placement: Placement, error: WorkerBusy) -> Placement:
        """Try another worker when one's queue is full, which is no fault of its. Raises Overloaded."""
        self._leave(generation, placement)
        generation.passes += 1
        if generation.passes > MAX_PASSES:
            raise Overloaded(str(error)) from error
        try:
            return self._place(generation)
        except Unavailable:
            raise Overloaded(str(error)) from error

    def _move(self, generation: Generation, placement: Placement, error: WorkerLost) -> Placement:
        """Take a lost worker out and choose the next. Raises Unavailable when the failovers are used up."""
        log.warning(
            "worker lost request_id=%s worker_id=%s epoch=%d: %s",
            generation.request_id,
            placement.worker_id,
            placement.epoch,
            error,
        )
        self._leave(generation, placement)
        self._state.registry.report_failure(placement.worker_id, placement.epoch)
        generation.failovers += 1
        if generation.failovers > self._limits.max_failovers:
            raise Unavailable(
                f"the stream lost {generation.failovers} workers, the limit is {self._limits.max_failovers}"
            ) from error
        try:
            return self._place(generation)
        except Unavailable as nobody:
            raise Unavailable(f"worker {placement.worker_id} was lost and {nobody}") from error

    def _leave(self, generation: Generation, placement: Placement) -> None:
        self._state.loads.finish(generation.wire_id, self._clock())
        self._state.predicted.forget(placement.worker_id, generation.prompt.keys)
        generation.moved()
        generation.avoid.add(placement.worker_id)

    async def _stream(
        self, generation: Generation, placement: Placement
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Stream from one worker to the end. Raises WorkerLost with what arrived kept in the generation."""
        requests = worker_requests(generation, placement, self._limits.queue_timeout_s)
        begun = False
        streams = [self._workers.generate(placement.address, request) for request in requests]
        async with aclosing(merged(streams)) as messages:
            async for index, message in messages:
                if message.updates and not begun:
                    begun = True
                    self._state.loads.first_token(generation.wire_id, self._clock())
                    self._state.registry.report_success(placement.worker_id, placement.epoch)
                for event in generation.take(message, placement):
                    yield event
                if generation.ended:
                    return
                cut = generation.take_cut()
                if cut:  # by a stop string, of which the worker knows nothing
                    await self._workers.stop_choices(placement.address, requests[index].request_id, cut)
        raise WorkerLost(f"worker {placement.worker_id} ended the stream too early")

    def _check_model(self, name: str) -> None:
        if name not in ("", self._model.name):
            raise InvalidRequest("model", f"must be {self._model.name!r}, is {name[:100]!r}")

    def _largest_pool(self) -> int:
        views = self._state.registry.serving()
        return max((v.record.load.blocks_total * v.record.block_size for v in views), default=0)
