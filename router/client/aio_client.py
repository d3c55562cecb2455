"""The asyncio client: the blocking one's methods, to be awaited. For one event loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Unpack

import grpc

from kvhive.client.answers import Answer
from kvhive.client.connection import ADMIN_TIMEOUT_S, OPTIONS, TOKENIZE_TIMEOUT_S, Address
from kvhive.client.failures import failure
from kvhive.client.messages import (
    Event,
    Options,
    PrewarmOptions,
    Prompt,
    event_of,
    generate_request,
    prewarm_request,
    tokenize_request,
)
from kvhive.client.retrying import LAST, Retry
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc


class AsyncClient:
    """Calls to one router; an async context manager. Errors are KvhiveErrors; what may be retried is."""

    def __init__(
        self,
        target: str,
        *,
        api_key: str = "",
        retry: Retry = Retry(),  # noqa: B008 - frozen
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`target` is host:port; credentials are for TLS."""
        self._address = Address(target, api_key, credentials)
        self._retry = retry
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; streams that are open end."""
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Answer:
        """Generate, and return the whole answer."""
        answer = Answer()
        async with aclosing(self.stream(prompt, timeout_s=timeout_s, **options)) as events:
            async for event in events:
                answer.take(event)
        return answer

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Event, None]:
        """Generate, event by event. Closing the generator (`aclose`) cancels what is left."""
        return self.send(generate_request(prompt, options), timeout_s)

    async def send(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """As `stream`, with a request that is made already."""
        until = _deadline(timeout_s)
        attempt, begun = 1, False
        while True:
            call = self._stub.Generate(request, timeout=_left(until), metadata=self._address.metadata)
            try:
                async for response in call:
                    begun = True
                    event = event_of(response)
                    if event is not None:
                        yield event
                return
            except grpc.aio.AioRpcError as error:
                await self._wait_or_raise(error, LAST if begun else attempt, until)
            finally:
                call.cancel()
            attempt += 1

    async def prewarm(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[PrewarmOptions]
    ) -> pb.PrewarmResponse:
        """Bring a prompt into workers' caches; returns when it is there."""
        answer: pb.PrewarmResponse = await self._call(
            self._stub.Prewarm, prewarm_request(prompt, options), timeout_s
        )
        return answer

    async def tokenize(self, prompt: str | pb.Chat, *, model: str = "", cache_salt: str = "") -> list[int]:
        """Return the token ids that `generate` would compute."""
        request = tokenize_request(prompt, model, cache_salt)
        answer: pb.TokenizeResponse = await self._call(self._stub.Tokenize, request, TOKENIZE_TIMEOUT_S)
        return list(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """Return the text of token ids, special tokens included."""
        request = pb.DetokenizeRequest(token_ids=token_ids, model=model)
        answer: pb.DetokenizeResponse = await self._call(self._stub.Detokenize, request, TOKENIZE_TIMEOUT_S)
        return answer.text

    async def models(self) -> list[pb.Model]:
        """Return the models that can be named."""
        answer: pb.ListModelsResponse = await self._call(self._stub.ListModels, pb.ListModelsRequest())
        return list(answer.models)

    async def cluster(self, *, audit: bool = False) -> pb.GetClusterResponse:
        """Return the cluster as the router sees it."""
        answer: pb.GetClusterResponse = await self._call(
            self._stub.GetCluster, pb.GetClusterRequest(audit=audit)
        )
        return answer

    async def explain(self, request_id: str) -> list[pb.RouteDecision]:
        """Return why requests of an id went where they did, the oldest first. Raises NotFound."""
        answer: pb.ExplainResponse = await self._call(
            self._stub.Explain, pb.ExplainRequest(request_id=request_id)
        )
        return list(answer.decisions)

    async def _call(self, method: Any, request: Any, timeout_s: float | None = ADMIN_TIMEOUT_S) -> Any:
        until, attempt = _deadline(timeout_s), 1
        while True:
            try:
                return await method(request, timeout=_left(until), metadata=self._address.metadata)
            except grpc.aio.AioRpcError as error:
                await self._wait_or_raise(error, attempt, until)
            attempt += 1

    async def _wait_or_raise(self, error: grpc.aio.AioRpcError, attempt: int, until: float | None) -> None:
        failed = failure(error, self._address.target)
        wait_s = self._retry.wait_s(failed, attempt, random.random())
        left_s = _left(until)
        if wait_s is None or (left_s is not None and wait_s >= left_s):
            raise failed from error
        await asyncio.sleep(wait_s)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
