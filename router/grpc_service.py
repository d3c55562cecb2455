"""kvhive.v1.Inference over gRPC: each call in our own words to the Frontend, and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from kvhive.proto.errors import KvhiveError, Unavailable
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.auth.principal import asking
from kvhive.router.decision_ledger import MAX_DECISIONS
from kvhive.router.field_checks import check_token_ids
from kvhive.router.frontend import TokenizingFrontend
from kvhive.router.grpc_counts import check_counts, check_detokenized_count
from kvhive.router.grpc_errors import abort, end, error_info
from kvhive.router.grpc_requests import generate_request, prewarm_request, prompt
from kvhive.router.grpc_responses import generate_responses, prewarm_response
from kvhive.router.request import check_request_id

_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
SERVICE_NAME: str = _SERVICE.full_name
REQUEST_TYPES: dict[str, type[Message]] = {
    f"/{SERVICE_NAME}/{method.name}": getattr(pb, method.input_type.name) for method in _SERVICE.methods
}
"""The request message of every RPC, by full method name."""

Explain: TypeAlias = Callable[[str, str | None], pb.ExplainResponse]
"""Tells of a request id what is remembered: of one tenant's requests, or of everybody's."""

_STOPPING = Unavailable("the router is stopping, retry", cause="stopping", retry_after_s=1.0)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The RPCs of one router."""

    def __init__(
        self,
        frontend: TokenizingFrontend,
        cluster: Callable[[], pb.GetClusterResponse],
        audit: Callable[[], pb.RouterAudit] = pb.RouterAudit,
        explain: Explain = lambda request_id, tenant: pb.ExplainResponse(),
    ) -> None:
        self._frontend = frontend
        self._cluster = cluster
        self._audit = audit
        self._explain = explain
        self._draining = False
        self._streams = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Refuse new generations, and wait up to `grace_s` seconds until none runs on this door."""
        self._draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)

    @property
    def max_context(self) -> int:
        """Tokens of the model's context: the most that any list of ids may have."""
        return self._frontend.models()[0].max_context

    def _check_counts(self, request: pb.GenerateRequest | pb.TokenizeRequest | pb.PrewarmRequest) -> None:
        check_counts(request, self.max_context)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one generation; a client that goes away cancels it."""
        if self._draining:
            await abort(context, _STOPPING)
        self._streams += 1
        self._idle.clear()
        try:
            self._check_counts(request)
            asked = generate_request(request, context.time_remaining())
            async with aclosing(self._frontend.generate(asked)) as events:
                async for event in events:
                    for response in generate_responses(event):
                        yield response
        except KvhiveError as error:
            await abort(context, error)
        finally:
            self._streams -= 1
            if not self._streams:
                self._idle.set()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Tokenise text or chat."""
        try:
            self._check_counts(request)
            ids = await self._frontend.tokenize(prompt(request), request.model, request.cache_salt)
            return pb.TokenizeResponse(token_ids=ids)
        except KvhiveError as error:
            await abort(context, error)
            raise

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Turn token ids into text."""
        model = self._frontend.models()[0]
        try:
            check_detokenized_count(request, model.max_context)
            check_token_ids("token_ids", request.token_ids, model.vocab_size)  # here the field has its name
            text = await self._frontend.detokenize(request.token_ids, request.model)
        except KvhiveError as error:
            await abort(context, error)
            raise
        return pb.DetokenizeResponse(text=text)

    async def Prewarm(self, request: pb.PrewarmRequest, context: Any) -> pb.PrewarmResponse:
        """Bring a prompt into some workers' caches."""
        if self._draining:
            await abort(context, _STOPPING)
        try:
            self._check_counts(request)
            usages = await self._frontend.prewarm(
                prewarm_request(request), request.workers if request.HasField("workers") else 1
            )
        except KvhiveError as error:
            await abort(context, error)
            raise
        return prewarm_response(usages)

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        """Say why requests of an id went where they did."""
        try:
            check_request_id("request_id", request.request_id)
        except KvhiveError as error:
            await abort(context, error)
        principal = asking.get()
        tenant = None if principal is None or principal.admin else principal.name
        answer = self._explain(request.request_id, tenant)
        if not answer.decisions:
            wanted = request.request_id
            message = f"request_id: {wanted!r} is not among the last {MAX_DECISIONS} decisions of this router"
            await end(context, grpc.StatusCode.NOT_FOUND, message, (error_info("unknown_request"),))
        return answer

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
