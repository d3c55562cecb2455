"""kvhive.v1.Worker over gRPC: carries requests into the engine and its outputs back out."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from kvhive.proto.errors import ComputeError, InvalidRequest, KvhiveError, Overloaded
from kvhive.proto.index_schema import WorkerState
from kvhive.proto.transport import CLUSTER_TOKEN_KEY
from kvhive.proto.v1 import worker_pb2, worker_pb2_grpc
from kvhive.worker.engine import Engine, Output
from kvhive.worker.model_runner import ModelShape
from kvhive.worker.request_validation import to_sequence
from kvhive.worker.sequence import FinishReason

log = logging.getLogger(__name__)

CLEAR_CACHE_TIMEOUT_S = 30.0

_STATUS: dict[type[KvhiveError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ComputeError: grpc.StatusCode.INTERNAL,
}


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

        return grpc.unary_unary_rpc_method_handler(refuse)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """The RPCs of one worker. Lives on one event loop; `deliver` is called from the engine's thread."""

    def __init__(self, worker_id: str, shape: ModelShape) -> None:
        self.worker_id = worker_id
        self.state = WorkerState.STARTING
        self._shape = shape
        self._epoch: Callable[[], int] = lambda: 0
        self._engine: Engine | None = None
        self._streams: dict[str, asyncio.Queue[Output]] = {}
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

    async def Generate(
        self, request: worker_pb2.WorkerGenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        """Stream one request. The engine holds at most max_tokens outputs for a slow reader."""
        engine = await self._ready_engine(request.worker_id, context)
        try:
            seq = to_sequence(request, self._shape)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if seq.request_id in self._streams:
            await context.abort(
                grpc.StatusCode.ALREADY_EXISTS, f"request_id: {seq.request_id!r} is running here"
            )
        queue: asyncio.Queue[Output] = asyncio.Queue()  # bounded by the request's own max_tokens
        self._streams[seq.request_id] = queue
        self._idle.clear()
        engine.submit(seq)
        try:
            first, timeout = True, request.queue_timeout_s or None
            while True:
                try:
                    ready = [await asyncio.wait_for(queue.get(), timeout if first else None)]
                except TimeoutError:
                    await context.abort(
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                        f"queue_timeout_s: no first token within {request.queue_timeout_s:g} s",
                    )
                while not queue.empty():
                    ready.append(queue.get_nowait())
                failed = next((output.error for output in ready if output.error), None)
                if failed is not None:
                    await context.abort(_STATUS.get(type(failed), grpc.StatusCode.UNAVAILABLE), str(failed))
                yield _response(ready, first)
                if ready[-1].finish is not None:
                    return
                first = False
        finally:
            # Also when the client has gone: the generator is closed then. Ending twice does no harm.
            del self._streams[seq.request_id]
            if not self._streams:
                self._idle.set()
            engine.cancel(seq.request_id)

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: Any
    ) -> worker_pb2.GetStatusResponse:
        """Report the accounting as of the end of the last step."""
        engine = await self._ready_engine("", context, draining_too=True)
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
        engine = await self._ready_engine("", context, draining_too=True)
        cleared: asyncio.Future[int] = self._loop.create_future()

        def settle(count: int) -> None:
            if not cleared.done():  # else the caller has gone
                cleared.set_result(count)

        def done(count: int) -> None:
            self._loop.call_soon_threadsafe(settle, count)

        engine.clear_cache(done)
        count = await asyncio.wait_for(cleared, CLEAR_CACHE_TIMEOUT_S)
        return worker_pb2.ClearCacheResponse(cleared_blocks=count)

    async def _ready_engine(self, meant_for: str, context: Any, draining_too: bool = False) -> Engine:
        if meant_for not in ("", self.worker_id):
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"worker_id: the request is for {meant_for!r}, this is {self.worker_id!r}",
            )
        serving = self.state is WorkerState.SERVING or (draining_too and self.state is WorkerState.DRAINING)
        if self._engine is None or not serving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"worker {self.worker_id} is {self.state.value}")
        assert self._engine is not None
        return self._engine

    def _distribute(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:  # else the client has gone and the cancellation is on its way
                stream.put_nowait(output)


def _response(outputs: list[Output], first: bool) -> worker_pb2.WorkerGenerateResponse:
    response = worker_pb2.WorkerGenerateResponse(token_ids=[t for output in outputs for t in output.tokens])
    if first:
        response.cached_tokens = outputs[0].cached_tokens
        response.written_tokens = outputs[0].written_tokens
    last = outputs[-1]
    if last.finish is not None:
        response.finished.stopped = last.finish is FinishReason.STOP
    return response
