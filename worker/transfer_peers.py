"""How workers ask each other for blocks: the calling side of kvhive.v1.Worker between two workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from kvhive.proto.transport import CLUSTER_TOKEN_KEY, MAX_MESSAGE_BYTES
from kvhive.proto.v1 import worker_pb2, worker_pb2_grpc
from kvhive.worker.block_desk import PullOutcome

MAX_PEERS = 64
"""Connections that are kept; an idle one beyond is closed."""

# As the router's: a killed peer is known in milliseconds and a hung one in about a second.
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

_OUTCOMES = {
    grpc.StatusCode.FAILED_PRECONDITION: PullOutcome.REFUSED,
    grpc.StatusCode.UNAUTHENTICATED: PullOutcome.REFUSED,
    grpc.StatusCode.UNIMPLEMENTED: PullOutcome.REFUSED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: PullOutcome.BUSY,
    grpc.StatusCode.DEADLINE_EXCEEDED: PullOutcome.TIMED_OUT,
}


class PeerFailed(Exception):
    """A peer did not do what it was asked for."""

    def __init__(self, outcome: PullOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class ChannelForgotten(Exception):
    """The peer does not know a channel that was made with it before."""


class Peers:
    """One connection per address. For one event loop."""

    def __init__(self, cluster_token: str) -> None:
        self._metadata = ((CLUSTER_TOKEN_KEY, cluster_token),)
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._calls: dict[str, int] = {}

    async def send_blocks(
        self, address: str, request: worker_pb2.SendBlocksRequest
    ) -> AsyncGenerator[worker_pb2.SendBlocksResponse, None]:
        """Ask a source. Closing the iterator gives up. Raises PeerFailed, ChannelForgotten."""
        stub = await self._stub(address)
        async for response in self._stream(address, stub.SendBlocks, request, request.timeout_s):
            yield response

    async def fetch_chains(
        self, address: str, request: worker_pb2.FetchChainsRequest, timeout_s: float
    ) -> AsyncGenerator[worker_pb2.ChainCopied, None]:
        """Ask a target to pull. Raises PeerFailed."""
        stub = await self._stub(address)
        async for response in self._stream(address, stub.FetchChains, request, timeout_s):
            yield response

    async def close(self) -> None:
        """Close everything."""
        while self._channels:
            await self._channels.popitem()[1].close()

    async def _stream(
        self, address: str, method: Any, request: Any, timeout_s: float
    ) -> AsyncGenerator[Any, None]:
        call = method(request, metadata=self._metadata, timeout=timeout_s)
        self._calls[address] = self._calls.get(address, 0) + 1
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise ChannelForgotten(error.details()) from error
            outcome = _OUTCOMES.get(error.code(), PullOutcome.UNREACHABLE)
            raise PeerFailed(outcome, f"{address}: {error.code().name}: {error.details()}") from error
        finally:
            call.cancel()
            self._calls[address] -= 1

    async def _stub(self, address: str) -> Any:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._channels.move_to_end(address)
        stub = worker_pb2_grpc.WorkerStub(self._channels[address])
        for old in list(self._channels)[:-MAX_PEERS]:
            idle = None if self._calls.get(old) else self._channels.pop(old, None)  # others close some, too
            if idle is not None:
                self._calls.pop(old, None)
                await idle.close()
        return stub
