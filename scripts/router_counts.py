"""What the router counts, for the autoscaling policy: asked every second; nothing while it is away."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc

from kvhive.client.connection import key_metadata
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.autoscaling_signals import RouterCounts
from kvhive.scripts.router_process import ReadyRouter

INTERVAL_S = 1.0
_TIMEOUT_S = 2.0
_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 * 1024 * 1024)]


class RouterPoll:
    """Follows the router of one runtime directory, wherever it listens. For one event loop."""

    def __init__(self, ready_file: Path, api_key: str) -> None:
        self._ready_file = ready_file
        self._metadata = key_metadata(api_key)
        self._counts: dict[str, RouterCounts] = {}

    def counts(self) -> dict[str, RouterCounts]:
        """Return the last answer, by router; empty while there was none."""
        return self._counts

    async def run(self) -> None:
        """Ask until cancelled."""
        channel: grpc.aio.Channel | None = None
        target = ""
        try:
            while True:
                with contextlib.suppress(OSError, ValueError, TypeError):  # there is no router yet
                    now = ReadyRouter.load(self._ready_file).grpc
                    if now != target:
                        if channel is not None:
                            await channel.close()
                        target, channel = now, grpc.aio.insecure_channel(now, options=_OPTIONS)
                if channel is not None:
                    self._counts = await _ask(channel, self._metadata)
                await asyncio.sleep(INTERVAL_S)
        finally:
            if channel is not None:
                await channel.close()


async def _ask(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> dict[str, RouterCounts]:
    stub = inference_pb2_grpc.InferenceStub(channel)
    try:
        answer: pb.GetClusterResponse = await stub.GetCluster(
            pb.GetClusterRequest(), timeout=_TIMEOUT_S, metadata=metadata
        )
    except grpc.aio.AioRpcError:
        return {}
    router = answer.router
    counts = RouterCounts(router.first_tokens, router.first_tokens_in_goal, router.held)
    return {"router": counts}
