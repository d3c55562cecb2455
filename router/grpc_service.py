"""kvhive.v1.Inference over gRPC: translates messages for the Frontend, and errors to statuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any

import grpc
from google.protobuf.message import Message

from kvhive.proto.errors import ComputeError, InvalidRequest, KvhiveError, Overloaded, TimedOut
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.frontend import Delta, Finished, GenerationEvent, Started, TokenizingFrontend
from kvhive.router.request import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)

_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
SERVICE_NAME: str = _SERVICE.full_name
REQUEST_TYPES: dict[str, type[Message]] = {
    f"/{SERVICE_NAME}/{method.name}": getattr(pb, method.input_type.name) for method in _SERVICE.methods
}
"""The request message of every RPC, by full method name."""

_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The RPCs of one router."""

    def __init__(self, frontend: TokenizingFrontend, cluster: Callable[[], pb.GetClusterResponse]) -> None:
        self._frontend = frontend
        self._cluster = cluster
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
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the router is stopping, retry")
        self._streams += 1
        self._idle.clear()
        try:
            async with aclosing(self._frontend.generate(_request(request))) as events:
                async for event in events:
                    yield _response(event)
        except KvhiveError as error:
            await context.abort(_status(error), str(error))
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
            await context.abort(_status(error), str(error))
            raise

    async def GetCluster(self, request: pb.GetClusterRequest, context: Any) -> pb.GetClusterResponse:
        """Describe the cluster as this router sees it."""
        return self._cluster()

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """List the models that can be named."""
        return pb.ListModelsResponse(
            models=[
                pb.Model(name=m.name, max_context=m.max_context, vocab_size=m.vocab_size, identity=m.identity)
                for m in self._frontend.models()
            ]
        )


def _request(wire: pb.GenerateRequest) -> GenerateRequest:
    return GenerateRequest(
        prompt=_prompt(wire),
        sampling=_sampling(wire.sampling),
        model=wire.model,
        cache_salt=wire.cache_salt,
        cache_key=wire.cache_key,
        request_id=wire.request_id,
    )


def _prompt(wire: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    match wire.WhichOneof("input"):
        case "text":
            return TextPrompt(wire.text)
        case "token_ids":
            assert isinstance(wire, pb.GenerateRequest)
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
    )


def _response(event: GenerationEvent) -> pb.GenerateResponse:
    match event:
        case Started(request_id, worker_id, prompt_tokens):
            started = pb.Started(request_id=request_id, worker_id=worker_id, prompt_tokens=prompt_tokens)
            return pb.GenerateResponse(started=started)
        case Delta(text, token_ids):
            return pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=token_ids))
        case Finished(reason, usage):
            wire_usage = pb.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                reachable_tokens=usage.reachable_tokens,
                written_tokens=usage.written_tokens,
                worker_id=usage.worker_id,
                route_reason=usage.route_reason,
                failovers=usage.failovers,
            )
            return pb.GenerateResponse(finished=pb.Finished(reason=_REASONS[reason], usage=wire_usage))


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
