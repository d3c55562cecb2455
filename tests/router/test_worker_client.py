"""The router's connections to workers: how soon a worker that was away is asked again."""

from __future__ import annotations

import pytest

from kvhive.proto.v1 import worker_pb2
from kvhive.router.worker_client import _CHANNEL_OPTIONS, GrpcWorkerClient, WorkerLost


async def test_a_worker_that_is_not_there_is_lost_at_once() -> None:
    client = GrpcWorkerClient("token")
    with pytest.raises(WorkerLost):
        await anext(client.generate("127.0.0.1:1", request(1)))
    await client.close()


def test_a_worker_that_is_back_is_reached_within_seconds_however_long_it_was_away() -> None:
    """grpc waits up to two minutes before it connects again, and until then refuses by itself."""
    assert dict(_CHANNEL_OPTIONS)["grpc.max_reconnect_backoff_ms"] <= 2000


def request(number: int) -> worker_pb2.WorkerGenerateRequest:
    return worker_pb2.WorkerGenerateRequest(request_id=f"r{number}", worker_id="w1")
