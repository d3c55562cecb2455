"""The real doors of a router, with their real options, in front of any frontend."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from prometheus_client import CollectorRegistry

from kvhive.proto.config import RouterConfig
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.doors import Doors
from kvhive.router.frontend import TokenizingFrontend
from kvhive.router.grpc_service import Explain, InferenceService
from kvhive.router.http_app import create_app


@contextlib.asynccontextmanager
async def grpc_door(
    frontend: TokenizingFrontend,
    cluster: Callable[[], pb.GetClusterResponse] = pb.GetClusterResponse,
    explain: Explain = lambda request_id, tenant: pb.ExplainResponse(),
) -> AsyncIterator[tuple[Doors, str]]:
    """Open them; yields them and the address of gRPC."""
    service = InferenceService(frontend, cluster, explain=explain)
    doors = Doors(RouterConfig(), service, create_app(frontend, CollectorRegistry()))
    endpoints = await doors.open()
    try:
        yield doors, endpoints.grpc
    finally:
        await doors.close(0.1)
