"""What a controller asks of workers over gRPC, each bounded in time: silence is an error, never a hang."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

import grpc

from kvhive.proto.errors import Unavailable
from kvhive.proto.index_schema import WorkerRecord, WorkerState
from kvhive.proto.transport import CLUSTER_TOKEN_KEY, MAX_MESSAGE_BYTES
from kvhive.proto.v1 import worker_pb2, worker_pb2_grpc

ANSWER_TIMEOUT_S = 5.0
"""For what a worker answers between two steps; the longest step takes a second or two."""
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
T = TypeVar("T")


class WorkerCalls:
    """A connection for each worker that was asked. For one event loop. All raise Unavailable."""

    def __init__(self, cluster_token: str) -> None:
        self._metadata = ((CLUSTER_TOKEN_KEY, cluster_token),)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def set_state(self, worker: WorkerRecord, state: WorkerState) -> int:
        """Let a worker serve, or drain; return how many requests are open there."""
        request = worker_pb2.SetStateRequest(worker_id=worker.worker_id, state=state.value)
        answer = await self._answer(worker, self._stub(worker).SetState(request, **self._limits()))
        return int(answer.open_requests)

    async def hot_chains(self, worker: WorkerRecord, chains: int, blocks: int) -> list[worker_pb2.HotChain]:
        """Return what it holds that is most worth keeping, hottest first."""
        request = worker_pb2.ListHotChainsRequest(
            worker_id=worker.worker_id, max_chains=chains, max_blocks=blocks
        )
        call = self._stub(worker).ListHotChains(request, **self._limits())
        return [chain async for chain in self._answers(worker, call)]

    def copy_chains(
        self,
        giver: WorkerRecord,
        heir: WorkerRecord,
        chains: Sequence[worker_pb2.Chain],
        timeout_s: float,
    ) -> AsyncIterator[worker_pb2.ChainCopied]:
        """Let one worker hand chains to another; an answer for each as it comes, or does not."""
        target = worker_pb2.BlockSource(worker_id=heir.worker_id, address=heir.address, epoch=heir.epoch)
        request = worker_pb2.CopyChainsRequest(worker_id=giver.worker_id, target=target, chains=chains)
        return self._answers(giver, self._stub(giver).CopyChains(request, **self._limits(timeout_s)))

    async def retain(self, addresses: set[str]) -> None:
        """Close the connections to all other addresses."""
        for address in self._channels.keys() - addresses:
            await self._channels.pop(address).close()

    def _limits(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        return {"metadata": self._metadata, "timeout": timeout_s}

    def _stub(self, worker: WorkerRecord) -> Any:
        if worker.address not in self._channels:
            self._channels[worker.address] = grpc.aio.insecure_channel(worker.address, options=_OPTIONS)
        return worker_pb2_grpc.WorkerStub(self._channels[worker.address])

    async def _answer(self, worker: WorkerRecord, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise _lost(worker, error) from error

    async def _answers(self, worker: WorkerRecord, call: Any) -> AsyncIterator[Any]:
        try:
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise _lost(worker, error) from error
        finally:
            call.cancel()


def _lost(worker: WorkerRecord, error: grpc.aio.AioRpcError) -> Unavailable:
    return Unavailable(f"worker {worker.worker_id}: {error.code().name}: {error.details()}")
