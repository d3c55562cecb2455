"""kvhive.v1.Worker over gRPC: carries requests into the engine and its outputs back out."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from kvhive.proto.errors import KvhiveError, TimedOut
from kvhive.proto.index_schema import WorkerState
from kvhive.proto.transport import CLUSTER_TOKEN_KEY
from kvhive.proto.v1 import worker_pb2, worker_pb2_grpc
from kvhive.worker.engine import Engine, Output
from kvhive.worker.model_runner import ModelShape
from kvhive.worker.refusal import Refused, status_of
from kvhive.worker.request_stream import RequestStream
from kvhive.worker.request_validation import choice_of, to_sequences
from kvhive.worker.session import Session

log = logging.getLogger(__name__)

CLEAR_CACHE_TIMEOUT_S = 30.0


class ClusterTokenGuard(grpc.aio.ServerInterceptor):
    """Refuses calls that do not carry the cluster's token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Let the call through, or answer UNAUTHENTICATED in its stead."""
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = str(metadata.get(CLUSTER_TOKEN_KEY, "")).encode()
        handler = await continuation(handler_call_details)
        if handler is None or hmac.compare_digest(given, self._token):
            return handler

        async def refuse(_request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{CLUSTER_TOKEN_KEY}: missing or wrong")

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """The RPCs of one worker. Lives on one event loop; `deliver` is called from the engine's thread."""

    def __init__(self, worker_id: str, shape: ModelShape) -> None:
        self.worker_id = worker_id
        self.state = WorkerState.STARTING
        self._shape = shape
        self._epoch: Callable[[], int] = lambda: 0
        self._engine: Engine | None = None
        self._streams: dict[str, RequestStream] = {}
        self._sessions: set[Session] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()

    def attach(self, engine: Engine, epoch: Callable[[], int]) -> None:
        """Give the service its engine; before that every call is refused."""
        self._engine = engine
        self._epoch = epoch

    def deliver(self, outputs: list[Output]) -> None:
        """Hand a step's outputs to their streams. Any thread; one hop to the loop per step."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._distribute, outputs)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no stream is open; False when that takes longer than `timeout_s`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    @property
    def open_streams(self) -> int:
        """Requests that have not ended yet."""
        return len(self._streams)

    def open(
        self, request: worker_pb2.WorkerGenerateRequest, heard: Callable[[], None] | None = None
    ) -> RequestStream:
        """See RequestDesk."""
        engine = self._ready_engine(request.worker_id)
        sequences = to_sequences(request, self._shape)
        request_id = request.request_id
        if request_id in self._streams:
            raise Refused("ALREADY_EXISTS", f"request_id: {request_id!r} is running here")
        stream = RequestStream((seq.sampling.choice for seq in sequences), heard)
        self._streams[request_id] = stream
        self._idle.clear()
        for seq in sequences:
            engine.submit(seq)
        return stream

    def close(self, request_id: str) -> None:
        """See RequestDesk. Sequences that have ended are ended twice, which does no harm."""
        stream = self._streams.pop(request_id)
        if not self._streams:
            self._idle.set()
        assert self._engine is not None
        for choice in stream.choices:
            self._engine.cancel(f"{request_id}/{choice}")

    async def Generate(
        self, request: worker_pb2.WorkerGenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        """Stream one request's choices; they end as a group, however the stream ends."""
        try:
            async with aclosing(self._generate(request)) as responses:
                async for response in responses:
                    yield response
        except KvhiveError as error:
            await context.abort(grpc.StatusCode[status_of(error)], str(error))

    async def _generate(
        self, request: worker_pb2.WorkerGenerateRequest
    ) -> AsyncGenerator[worker_pb2.WorkerGenerateResponse, None]:
        stream = self.open(request)
        deadline = self._loop.time() + request.queue_timeout_s if request.queue_timeout_s else None
        try:
            while not stream.ended:
                async with asyncio.timeout_at(None if stream.begun else deadline):
                    response = await stream.take()
                yield response
        except TimeoutError as error:
            message = f"queue_timeout_s: no first token within {request.queue_timeout_s:g} s"
            raise TimedOut(message) from error
        finally:
            self.close(request.request_id)  # also when the client has gone: the generator is closed then

    async def Session(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        """Stream all of a router's requests."""
        session = Session(self)
        self._sessions.add(session)
        try:
            async with aclosing(session.run(requests)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._sessions.discard(session)

    def end_sessions(self) -> None:
        """Let routers go, after their requests have ended."""
        for session in self._sessions:
            session.end()

    async def StopChoices(
        self, request: worker_pb2.StopChoicesRequest, context: Any
    ) -> worker_pb2.StopChoicesResponse:
        """End some choices of a running request, and leave all else alone."""
        engine = await self._engine_or_abort(context)
        stream = self._streams.get(request.request_id)
        if stream is not None:
            for choice in request.choices:
                if stream.stop(choice):
                    engine.cancel(f"{request.request_id}/{choice}")
        return worker_pb2.StopChoicesResponse()

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: Any
    ) -> worker_pb2.GetStatusResponse:
        """Report the accounting as of the end of the last step."""
        engine = await self._engine_or_abort(context)
        load = engine.load
        return worker_pb2.GetStatusResponse(
            worker_id=self.worker_id,
            epoch=self._epoch(),
            state=self.state,
            blocks_total=load.blocks_total,
            blocks_live=load.blocks_live,
            blocks_cached=load.blocks_cached,
            blocks_free=load.blocks_free,
            running=load.running,
            waiting=load.waiting,
            queued_prefill_tokens=load.queued_prefill_tokens,
            steps=engine.steps,
            pid=os.getpid(),
        )

    async def ClearCache(
        self, request: worker_pb2.ClearCacheRequest, context: Any
    ) -> worker_pb2.ClearCacheResponse:
        """Forget every cached block that no request is using."""
        engine = await self._engine_or_abort(context)
        cleared: asyncio.Future[int] = self._loop.create_future()

        def settle(count: int) -> None:
            if not cleared.done():  # else the caller has gone
                cleared.set_result(count)

        def done(count: int) -> None:
            self._loop.call_soon_threadsafe(settle, count)

        engine.clear_cache(done)
        count = await asyncio.wait_for(cleared, CLEAR_CACHE_TIMEOUT_S)
        return worker_pb2.ClearCacheResponse(cleared_blocks=count)

    async def _engine_or_abort(self, context: Any) -> Engine:
        try:
            return self._ready_engine("", draining_too=True)
        except Refused as error:
            await context.abort(grpc.StatusCode[error.status], str(error))
            raise

    def _ready_engine(self, meant_for: str, draining_too: bool = False) -> Engine:
        if meant_for not in ("", self.worker_id):
            raise Refused(
                "FAILED_PRECONDITION",
                f"worker_id: the request is for {meant_for!r}, this is {self.worker_id!r}",
            )
        serving = self.state is WorkerState.SERVING or (draining_too and self.state is WorkerState.DRAINING)
        if self._engine is None or not serving:
            raise Refused("UNAVAILABLE", f"worker {self.worker_id} is {self.state.value}")
        return self._engine

    def _distribute(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(choice_of(output.request_id)[0])
            if stream is not None:  # else the client has gone and the cancellation is on its way
                stream.put(output)
