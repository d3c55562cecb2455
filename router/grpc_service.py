"""kvhive.v1.Inference over gRPC: translates messages for the Frontend, and errors to statuses."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any

import grpc
from google.protobuf.message import Message

from kvhive.proto.errors import (
    ComputeError,
    InvalidRequest,
    KvhiveError,
    NotNow,
    Overloaded,
    TimedOut,
    Unavailable,
)
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.chat.messages import ChatMessage, ChatPrompt
from kvhive.router.frontend import (
    Delta,
    Finished,
    GenerationEvent,
    Started,
    TokenizingFrontend,
    TokenLogprobs,
    Usage,
)
from kvhive.router.prewarm import keeping
from kvhive.router.request import GenerateRequest, Prompt, TextPrompt, TokenPrompt
from kvhive.router.sampling_params import SamplingParams

_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
SERVICE_NAME: str = _SERVICE.full_name
REQUEST_TYPES: dict[str, type[Message]] = {
    f"/{SERVICE_NAME}/{method.name}": getattr(pb, method.input_type.name) for method in _SERVICE.methods
}
"""The request message of every RPC, by full method name."""

RETRY_AFTER_KEY = "retry-after-ms"
"""Trailing metadata: in how many milliseconds a refused request should be tried again."""

_STOPPING = Unavailable("the router is stopping, retry", cause="stopping", retry_after_s=1.0)
_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The RPCs of one router."""

    def __init__(
        self,
        frontend: TokenizingFrontend,
        cluster: Callable[[], pb.GetClusterResponse],
        audit: Callable[[], pb.RouterAudit] = pb.RouterAudit,
    ) -> None:
        self._frontend = frontend
        self._cluster = cluster
        self._audit = audit
        self._draining = False
        self._streams = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Refuse new generations, and wait up to `grace_s` seconds until none runs on this door."""
        self._draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one generation; a client that goes away cancels it."""
        if self._draining:
            await _abort(context, _STOPPING)
        self._streams += 1
        self._idle.clear()
        try:
            asked = _request(request, context.time_remaining())
            async with aclosing(self._frontend.generate(asked)) as events:
                async for event in events:
                    yield _response(event)
        except KvhiveError as error:
            await _abort(context, error)
        finally:
            self._streams -= 1
            if not self._streams:
                self._idle.set()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Tokenise text or chat."""
        try:
            return pb.TokenizeResponse(
                token_ids=await self._frontend.tokenize(_prompt(request), request.model)
            )
        except KvhiveError as error:
            await _abort(context, error)
            raise

    async def Prewarm(self, request: pb.PrewarmRequest, context: Any) -> pb.PrewarmResponse:
        """Bring a prompt into some workers' caches."""
        if self._draining:
            await _abort(context, _STOPPING)
        try:
            asked = GenerateRequest(
                prompt=_prompt(request),
                model=request.model,
                cache_salt=request.cache_salt,
                cache_key=request.cache_key,
            )
            if request.HasField("ttl_s"):
                asked = keeping(asked, request.ttl_s)
            usages = await self._frontend.prewarm(
                asked, request.workers if request.HasField("workers") else 1
            )
        except KvhiveError as error:
            await _abort(context, error)
            raise
        return pb.PrewarmResponse(prompt_tokens=usages[0].prompt_tokens, workers=map(_prewarmed, usages))

    async def GetCluster(self, request: pb.GetClusterRequest, context: Any) -> pb.GetClusterResponse:
        """Describe the cluster as this router sees it."""
        answer = self._cluster()
        if request.audit:
            answer.audit.CopyFrom(self._audit())
        return answer

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """List the models that can be named."""
        return pb.ListModelsResponse(
            models=[
                pb.Model(name=m.name, max_context=m.max_context, vocab_size=m.vocab_size, identity=m.identity)
                for m in self._frontend.models()
            ]
        )


def _request(wire: pb.GenerateRequest, timeout_s: float | None) -> GenerateRequest:
    return GenerateRequest(
        prompt=_prompt(wire),
        sampling=_sampling(wire.sampling),
        model=wire.model,
        cache_salt=wire.cache_salt,
        cache_key=wire.cache_key,
        request_id=wire.request_id,
        n=wire.n if wire.HasField("n") else 1,
        priority=wire.priority,
        tenant=wire.tenant,
        timeout_s=timeout_s,
    )


def _prewarmed(usage: Usage) -> pb.Prewarmed:
    return pb.Prewarmed(
        worker_id=usage.worker_id,
        cached_tokens=usage.cached_tokens,
        pulled_tokens=usage.pulled_tokens,
        written_tokens=usage.written_tokens,
        kept=bool(usage.kept) and not usage.not_kept,
        not_kept=usage.not_kept,
    )


def _prompt(wire: pb.GenerateRequest | pb.TokenizeRequest | pb.PrewarmRequest) -> Prompt:
    match wire.WhichOneof("input"):
        case "text":
            return TextPrompt(wire.text)
        case "token_ids":
            assert not isinstance(wire, pb.TokenizeRequest)
            return TokenPrompt(tuple(wire.token_ids.ids))
        case "chat":
            return ChatPrompt(tuple(ChatMessage(m.role, m.content) for m in wire.chat.messages))
        case _:
            raise InvalidRequest("input", "one of text, token_ids and chat must be set, none is")


def _sampling(wire: pb.SamplingParams) -> SamplingParams:
    def given(name: str, default: Any) -> Any:
        return getattr(wire, name) if wire.HasField(name) else default

    return SamplingParams(
        max_tokens=given("max_tokens", None),
        temperature=given("temperature", 0.0),
        top_k=given("top_k", 0),
        top_p=given("top_p", 1.0),
        min_p=given("min_p", 0.0),
        seed=given("seed", None),
        stop=tuple(wire.stop),
        stop_token_ids=tuple(wire.stop_token_ids),
        ignore_eos=given("ignore_eos", False),
        typical_p=given("typical_p", 1.0),
        repetition_penalty=given("repetition_penalty", 1.0),
        frequency_penalty=given("frequency_penalty", 0.0),
        presence_penalty=given("presence_penalty", 0.0),
        logit_bias=tuple(sorted(wire.logit_bias.items())),
        min_tokens=given("min_tokens", 0),
        logprobs=given("logprobs", None),
        prompt_logprobs=given("prompt_logprobs", None),
        speculate=given("speculate", True),
    )


def _response(event: GenerationEvent) -> pb.GenerateResponse:
    match event:
        case Started(request_id, worker_id, prompt_tokens):
            started = pb.Started(request_id=request_id, worker_id=worker_id, prompt_tokens=prompt_tokens)
            return pb.GenerateResponse(started=started)
        case Delta():
            delta = pb.Delta(
                text=event.text,
                token_ids=event.token_ids,
                choice=event.choice,
                logprobs=map(_logprobs, event.logprobs),
                prompt_logprobs=map(_logprobs, event.prompt_logprobs),
            )
            return pb.GenerateResponse(delta=delta)
        case Finished(reason, usage, choice):
            finished = pb.Finished(reason=_REASONS[reason], choice=choice)
            if usage is not None:
                finished.usage.CopyFrom(_usage(usage))
            return pb.GenerateResponse(finished=finished)


def _logprobs(position: TokenLogprobs) -> pb.Logprobs:
    top = [pb.TokenAlternative(token_id=token_id, logprob=logprob) for token_id, logprob in position.top]
    return pb.Logprobs(logprob=position.logprob, top=top)


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reachable_tokens=usage.reachable_tokens,
        written_tokens=usage.written_tokens,
        worker_id=usage.worker_id,
        route_reason=usage.route_reason,
        failovers=usage.failovers,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        pulled_tokens=usage.pulled_tokens,
    )


async def _abort(context: Any, error: KvhiveError) -> None:
    """End the call with the error's status, and say when it may be tried again, where somebody knows."""
    seconds = error.retry_after_s if isinstance(error, NotNow) else None
    when = () if seconds is None else ((RETRY_AFTER_KEY, str(math.ceil(seconds * 1000))),)
    await context.abort(_status(error), str(error), when)


def _status(error: KvhiveError) -> grpc.StatusCode:
    if isinstance(error, InvalidRequest):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, Overloaded):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, TimedOut):
        return grpc.StatusCode.DEADLINE_EXCEEDED
    if isinstance(error, ComputeError):
        return grpc.StatusCode.INTERNAL
    return grpc.StatusCode.UNAVAILABLE
