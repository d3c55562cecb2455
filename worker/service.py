"""kvhive.v1.Worker over gRPC: carries requests into the engine and its outputs back out."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import grpc

from kvhive.proto.block_hash import BlockKey, keys_digest
from kvhive.proto.errors import InvalidRequest, KvhiveError, TimedOut
from kvhive.proto.index_schema import WorkerState
from kvhive.proto.transport import CLUSTER_TOKEN_KEY
from kvhive.proto.v1 import worker_pb2, worker_pb2_grpc
from kvhive.worker.chain_wire import wire_chain
from kvhive.worker.engine import Engine, Output
from kvhive.worker.grammar_desk import GrammarDesk
from kvhive.worker.hot_chains import HotBounds
from kvhive.worker.kv_transfer import KvTransfer
from kvhive.worker.model_runner import ModelShape
from kvhive.worker.refusal import Refused, status_of
from kvhive.worker.request_stream import RequestStream
from kvhive.worker.request_validation import choice_of, to_sequences
from kvhive.worker.session import Session
from kvhive.worker.session_door import SessionDoor
from kvhive.worker.transfer_channel import ChannelBroken
from kvhive.worker.transfer_peers import PeerFailed
from kvhive.worker.transfer_source import ChannelUnknown, SendBusy, SendRefused

log = logging.getLogger(__name__)

T = TypeVar("T")

ENGINE_TIMEOUT_S = 30.0
"""Longest that a question to the engine's thread waits for the step that is running."""

_TRANSFER_STATUS: dict[type[Exception], grpc.StatusCode] = {
    SendRefused: grpc.StatusCode.FAILED_PRECONDITION,
    SendBusy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ChannelUnknown: grpc.StatusCode.NOT_FOUND,
    ChannelBroken: grpc.StatusCode.UNAVAILABLE,
}


_OPEN_STATES = (WorkerState.WARMING, WorkerState.SERVING, WorkerState.DRAINING)
"""In these a worker answers whatever is no new request: its blocks may move while it warms up or drains."""

_SETTABLE = (WorkerState.SERVING.value, WorkerState.DRAINING.value)


async def _tell_nobody(state: WorkerState) -> None:
    """What becomes of a state where no index is."""


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

    def __init__(self, worker_id: str, shape: ModelShape, grammars: GrammarDesk | None = None) -> None:
        self.worker_id = worker_id
        self.state = WorkerState.STARTING
        self._shape = shape
        self._grammars = grammars or GrammarDesk(None)
        self._epoch: Callable[[], int] = lambda: 0
        self._engine: Engine | None = None
        self._transfer: KvTransfer | None = None
        self._streams: dict[str, RequestStream] = {}
        self.door = SessionDoor()
        """To be opened before routers come."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._tell: Callable[[WorkerState], Awaitable[None]] = _tell_nobody
        self._closing = False

    def attach(
        self,
        engine: Engine,
        epoch: Callable[[], int],
        transfer: KvTransfer | None = None,
        tell: Callable[[WorkerState], Awaitable[None]] = _tell_nobody,
    ) -> None:
        """Give the service its engine; all calls are refused before. Without `transfer` no block moves.

        `tell` lets the index know of a new state.
        """
        self._engine = engine
        self._epoch = epoch
        self._transfer = transfer
        self._tell = tell

    async def change_state(self, state: WorkerState) -> None:
        """Be in a state, and tell the index. New requests are accepted while SERVING only."""
        self.state = state
        await self._tell(state)

    async def close_doors(self) -> None:
        """Drain for good: nothing lets this worker serve again."""
        self._closing = True
        await self.change_state(WorkerState.DRAINING)

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

        def wanted() -> bool:
            return self._streams.get(request_id) is stream

        self._grammars.begin(sequences, engine.submit, stream.put, wanted)
        return stream

    def close(self, request_id: str) -> None:
        """See RequestDesk. The engine is not woken for what has ended by itself."""
        stream = self._streams.pop(request_id)
        if not self._streams:
            self._idle.set()
        assert self._engine is not None
        for choice in stream.unfinished:
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
        self, request: worker_pb2.OpenSessionRequest, context: Any
    ) -> AsyncIterator[worker_pb2.SessionOffer]:
        """Let a router's session in, and stay as long as it does."""
        session = Session(self)
        # A call that is cancelled while it writes leaves its generator to the collector of garbage, some day.
        context.add_done_callback(lambda _: session.abandon())
        try:
            yield self.door.offer(session)
            await session.wait()
        finally:
            self.door.forget(session)

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
        audit = await self._audit(engine) if request.audit else None
        load = engine.load
        return worker_pb2.GetStatusResponse(
            worker_id=self.worker_id,
            epoch=self._epoch(),
            state=self.state,
            blocks_total=load.blocks_total,
            blocks_live=load.blocks_live,
            blocks_cached=load.blocks_cached,
            blocks_free=load.blocks_free,
            blocks_pinned=load.blocks_pinned,
            running=load.running,
            waiting=load.waiting,
            queued_prefill_tokens=load.queued_prefill_tokens,
            steps=engine.steps,
            pid=os.getpid(),
            pulls={outcome.value: count for outcome, count in engine.desk.outcomes.copy().items()},
            pulled_tokens=load.pulled_tokens,
            sent_blocks=engine.desk.sent_blocks,
            pull_latency_s=load.pull_latency_s,
            pull_bytes_per_s=load.pull_bytes_per_s,
            audit=audit,
        )

    async def _audit(self, engine: Engine) -> worker_pb2.WorkerAudit:
        audit = worker_pb2.WorkerAudit(
            open_requests=len(self._streams), sessions=self.door.sessions, tasks=len(asyncio.all_tasks())
        )

        def look(done: Callable[[tuple[list[BlockKey], int]], None]) -> None:
            engine.look_at(lambda pool: done((pool.keys(), pool.usage().pinned)))

        keys, audit.pinned_blocks = await self._from_engine(look)
        audit.blocks, audit.digest = len(keys), keys_digest(keys)
        return audit

    async def ClearCache(
        self, request: worker_pb2.ClearCacheRequest, context: Any
    ) -> worker_pb2.ClearCacheResponse:
        """Forget every cached block that no request is using."""
        engine = await self._engine_or_abort(context)
        return worker_pb2.ClearCacheResponse(cleared_blocks=await self._from_engine(engine.clear_cache))

    async def SendBlocks(
        self, request: worker_pb2.SendBlocksRequest, context: Any
    ) -> AsyncIterator[worker_pb2.SendBlocksResponse]:
        """Lend and send the leading blocks of a chain to another worker."""
        transfer = await self._ready_transfer(request.worker_id, context)
        try:
            async with aclosing(transfer.send_blocks(request)) as answers:
                async for answer in answers:
                    yield answer
        except (SendRefused, SendBusy, ChannelUnknown, ChannelBroken) as error:
            await context.abort(_TRANSFER_STATUS[type(error)], str(error))

    async def FetchChains(
        self, request: worker_pb2.FetchChainsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.ChainCopied]:
        """Pull chains from another worker."""
        transfer = await self._ready_transfer(request.worker_id, context)
        async for answer in self._copied(transfer.fetch_chains(request), context):
            yield answer

    async def CopyChains(
        self, request: worker_pb2.CopyChainsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.ChainCopied]:
        """Let another worker pull chains from this one."""
        transfer = await self._ready_transfer(request.worker_id, context)
        async for answer in self._copied(transfer.copy_chains(request), context):
            yield answer

    async def SetState(
        self, request: worker_pb2.SetStateRequest, context: Any
    ) -> worker_pb2.SetStateResponse:
        """Serve, or drain."""
        await self._engine_or_abort(context, request.worker_id)
        if request.state not in _SETTABLE:
            message = f"state: must be one of {', '.join(_SETTABLE)}, is {request.state!r}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        if self._closing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"worker {self.worker_id} is stopping")
        await self.change_state(WorkerState(request.state))
        return worker_pb2.SetStateResponse(epoch=self._epoch(), open_requests=len(self._streams))

    async def ListHotChains(
        self, request: worker_pb2.ListHotChainsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.HotChain]:
        """List what is most worth handing over."""
        engine = await self._engine_or_abort(context, request.worker_id)
        try:
            bounds = HotBounds(request.max_chains, request.max_blocks)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        for chain in await self._from_engine(partial(engine.desk.hot_chains, bounds)):
            yield worker_pb2.HotChain(
                chain=wire_chain(chain, leaving=self.state is WorkerState.DRAINING),
                new_blocks=chain.new_blocks,
                new_uses=chain.new_uses,
                idle_s=chain.idle_s,
            )

    async def _copied(
        self, answers: AsyncGenerator[worker_pb2.ChainCopied, None], context: Any
    ) -> AsyncIterator[worker_pb2.ChainCopied]:
        try:
            async with aclosing(answers):
                async for answer in answers:
                    yield answer
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except PeerFailed as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def _from_engine(self, ask: Callable[[Callable[[T], None]], None]) -> T:
        """Ask the engine's thread, and return what it answers between two steps."""
        answered: asyncio.Future[T] = self._loop.create_future()

        def settle(answer: T) -> None:
            if not answered.done():  # else the caller has gone
                answered.set_result(answer)

        def done(answer: T) -> None:
            self._loop.call_soon_threadsafe(settle, answer)

        ask(done)
        return await asyncio.wait_for(answered, ENGINE_TIMEOUT_S)

    async def _ready_transfer(self, meant_for: str, context: Any) -> KvTransfer:
        """Blocks may move while a worker drains, or warms up: that is when they should."""
        await self._engine_or_abort(context, meant_for)
        if self._transfer is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "workers.transfer.enabled: is off here")
        assert self._transfer is not None
        return self._transfer

    async def _engine_or_abort(self, context: Any, meant_for: str = "") -> Engine:
        try:
            return self._ready_engine(meant_for, _OPEN_STATES)
        except Refused as error:
            await context.abort(grpc.StatusCode[error.status], str(error))
            raise

    def _ready_engine(
        self, meant_for: str, allowed: Collection[WorkerState] = (WorkerState.SERVING,)
    ) -> Engine:
        if meant_for not in ("", self.worker_id):
            raise Refused(
                "FAILED_PRECONDITION",
                f"worker_id: the request is for {meant_for!r}, this is {self.worker_id!r}",
            )
        if self._engine is None or self.state not in allowed:
            raise Refused("UNAVAILABLE", f"worker {self.worker_id} is {self.state.value}")
        return self._engine

    def _distribute(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(choice_of(output.request_id)[0])
            if stream is not None:  # else the client has gone and the cancellation is on its way
                stream.put(output)
