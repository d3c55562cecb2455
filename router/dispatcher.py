"""Runs requests: prepare, place, stream, and go on elsewhere when a worker is lost.

The Frontend that both doors ask. A stream that loses its worker continues on the next best one from the
prompt and the tokens it already has; noise depends only on seed and position, so nothing is lost or doubled.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from kvhive.proto.block_hash import pack_tokens
from kvhive.proto.errors import InvalidRequest, Overloaded, Unavailable
from kvhive.proto.v1 import worker_pb2
from kvhive.router.frontend import Delta, Finished, FinishReason, GenerationEvent, ModelInfo, Started, Usage
from kvhive.router.metrics import RequestMetrics
from kvhive.router.output_text import OutputText
from kvhive.router.placement import Placement, Placer, RoutingState
from kvhive.router.prompt import PreparedPrompt, PromptPreparer
from kvhive.router.request import (
    GenerateRequest,
    Prompt,
    check_prompt_length,
    resolve_max_tokens,
    validate_request,
)
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.worker_client import WorkerClient, WorkerLost

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of one router."""

    max_concurrent: int
    max_failovers: int
    queue_timeout_s: float


@dataclass(slots=True)
class _Generation:
    """One request on its way: what is fixed, and what the streams have brought so far."""

    request: GenerateRequest
    request_id: str
    prompt: PreparedPrompt
    max_tokens: int
    seed: int
    output: OutputText
    stop_token_ids: list[int]
    cached_tokens: int | None = None
    written_tokens: int = 0
    failovers: int = 0
    lost: set[str] = field(default_factory=set)


class Dispatcher:
    """See Frontend. One per router process."""

    def __init__(
        self,
        model: ModelInfo,
        text: tuple[TextTokenizer, PromptPreparer],
        routing: tuple[RoutingState, Placer],
        workers: WorkerClient,
        limits: DispatchLimits,
        metrics: RequestMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._tokenizer, self._preparer = text
        self._state, self._placer = routing
        self._workers = workers
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._in_flight = 0

    def models(self) -> list[ModelInfo]:
        """See Frontend."""
        return [self._model]

    def ready(self) -> bool:
        """See Frontend."""
        return bool(self._state.registry.routable(self._clock()))

    async def tokenize(self, prompt: Prompt, model: str = "") -> list[int]:
        """Return the token ids that `generate` would compute. Raises InvalidRequest."""
        validate_request(
            GenerateRequest(prompt, model=model), self._model.vocab_size, self._model.max_context
        )
        self._check_model(model)
        return await self._preparer.tokenize(prompt)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See Frontend."""
        if self._in_flight >= self._limits.max_concurrent:
            self._metrics.refused("overloaded")
            raise Overloaded(
                f"{self._in_flight} requests are in flight, the limit is {self._limits.max_concurrent}"
            )
        self._in_flight += 1
        try:
            generation = await self._prepare(request)
            async with aclosing(self._run(generation)) as events:
                async for event in events:
                    yield event
        finally:
            self._in_flight -= 1

    async def _prepare(self, request: GenerateRequest) -> _Generation:
        model = self._model
        validate_request(request, model.vocab_size, model.max_context)
        self._check_model(request.model)
        prompt = await self._preparer.prepare(request)
        check_prompt_length("prompt", len(prompt.token_ids), model.max_context)
        sampling = request.sampling
        max_tokens = resolve_max_tokens(len(prompt.token_ids), sampling.max_tokens, model.max_context)
        if sampling.max_tokens is None:  # the caller named no number: what every pool can hold is meant
            max_tokens = max(1, min(max_tokens, self._largest_pool() - len(prompt.token_ids)))
        ends = () if sampling.ignore_eos else self._tokenizer.eos_token_ids
        return _Generation(
            request=request,
            request_id=request.request_id or f"req-{secrets.token_hex(12)}",
            prompt=prompt,
            max_tokens=max_tokens,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            output=OutputText(self._tokenizer, sampling.stop),
            stop_token_ids=sorted({*ends, *sampling.stop_token_ids}),
        )

    async def _run(self, generation: _Generation) -> AsyncGenerator[GenerationEvent, None]:
        """Place and stream until it is done, moving on when a worker is lost."""
        arrived = self._clock()
        placement = self._place(generation)
        yield Started(generation.request_id, placement.worker_id, len(generation.prompt.token_ids))
        while True:
            try:
                async with aclosing(self._stream(generation, placement, arrived)) as events:
                    async for event in events:
                        yield event
                return
            except WorkerLost as error:
                placement = self._move(generation, placement, error)
            finally:
                self._state.loads.finish(generation.request_id)

    def _place(self, generation: _Generation) -> Placement:
        placement = self._placer.place(
            generation.request_id, generation.prompt, generation.max_tokens, generation.lost
        )
        self._metrics.routed(placement.worker_id, placement.decision.reason)
        return placement

    def _move(self, generation: _Generation, placement: Placement, error: WorkerLost) -> Placement:
        """Take a lost worker out and choose the next. Raises Unavailable when the failovers are used up."""
        log.warning("request=%s worker=%s lost: %s", generation.request_id, placement.worker_id, error)
        self._state.loads.finish(generation.request_id)
        self._state.registry.report_failure(placement.worker_id, placement.epoch)
        self._state.predicted.forget(placement.worker_id, generation.prompt.keys)
        generation.lost.add(placement.worker_id)
        generation.failovers += 1
        self._metrics.failed_over(placement.worker_id)
        if generation.failovers > self._limits.max_failovers:
            raise Unavailable(
                f"the stream lost {generation.failovers} workers, the limit is {self._limits.max_failovers}"
            ) from error
        try:
            return self._place(generation)
        except Unavailable as nobody:
            raise Unavailable(f"worker {placement.worker_id} was lost and {nobody}") from error

    async def _stream(
        self, generation: _Generation, placement: Placement, arrived: float
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Stream from one worker to the end. Raises WorkerLost with what arrived kept in the generation."""
        output = generation.output
        async with aclosing(
            self._workers.generate(placement.address, self._wire(generation, placement))
        ) as stream:
            async for message in stream:
                if generation.cached_tokens is None:
                    generation.cached_tokens = message.cached_tokens
                    generation.written_tokens = message.written_tokens
                    self._metrics.first_token(self._clock() - arrived, generation.cached_tokens > 0)
                self._state.loads.first_token(generation.request_id, self._clock())
                text, token_ids = output.push(message.token_ids)
                if text or token_ids:
                    yield Delta(text, token_ids)
                if output.stopped or message.HasField("finished"):
                    rest = output.finish()
                    if rest:
                        yield Delta(rest)
                    yield self._finished(generation, placement, message.finished.stopped)
                    return
        raise WorkerLost(f"worker {placement.worker_id} ended the stream too early")

    def _wire(self, generation: _Generation, placement: Placement) -> worker_pb2.WorkerGenerateRequest:
        sampling, done = generation.request.sampling, generation.output.token_ids
        return worker_pb2.WorkerGenerateRequest(
            worker_id=placement.worker_id,
            request_id=generation.request_id,
            token_ids=generation.prompt.packed + pack_tokens(done),
            resumed_tokens=len(done),
            cache_salt=generation.request.cache_salt,
            queue_timeout_s=self._limits.queue_timeout_s,
            sampling=worker_pb2.WorkerSampling(
                max_tokens=generation.max_tokens - len(done),
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=generation.seed,
                stop_token_ids=generation.stop_token_ids,
            ),
        )

    def _finished(self, generation: _Generation, placement: Placement, stopped: bool) -> Finished:
        reason: FinishReason = "stop" if stopped or generation.output.stopped else "length"
        usage = Usage(
            prompt_tokens=len(generation.prompt.token_ids),
            completion_tokens=len(generation.output.token_ids),
            cached_tokens=generation.cached_tokens or 0,
            reachable_tokens=placement.reachable_tokens,
            written_tokens=generation.written_tokens,
            worker_id=placement.worker_id,
            route_reason=placement.decision.reason.value,
            failovers=generation.failovers,
        )
        self._metrics.finished(usage, reason)
        return Finished(reason, usage)

    def _check_model(self, name: str) -> None:
        if name not in ("", self._model.name):
            raise InvalidRequest("model", f"must be {self._model.name!r}, is {name[:100]!r}")

    def _largest_pool(self) -> int:
        views = self._state.registry.routable(self._clock())
        return max((v.record.load.blocks_total * v.record.block_size for v in views), default=0)
