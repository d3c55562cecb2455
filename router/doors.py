"""Both doors of a router, opened and closed together: gRPC with health and reflection, and HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from kvhive.proto.config import RouterConfig, bracketed
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.auth.grpc_guard import GrpcGuard
from kvhive.router.auth.guard import Guard
from kvhive.router.auth.http_guard import HttpGuard
from kvhive.router.grpc_faults import FaultGuard
from kvhive.router.grpc_service import REQUEST_TYPES, SERVICE_NAME, InferenceService
from kvhive.router.grpc_wire_counts import wire_limits
from kvhive.router.http_gateway import HttpServer
from kvhive.router.malformed_message import MalformedMessageGuard

EXTRA_RPCS = 1024
"""Calls beyond the limit on requests that gRPC still takes in: health, its watchers, status."""
MAX_WATCHERS = EXTRA_RPCS // 2
"""Open calls of health's Watch, which needs no key: they must not take all places."""
MAX_OPEN_CONNECTIONS = 4096
"""Of gRPC; one more is closed at once."""
HANDSHAKE_TIMEOUT_S = 20
"""Longest from a connection to its first words of HTTP/2."""

# Clients may ping idle and silent streams: a long prefill is not a broken connection.
_SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    # And a client that is frozen or lost without a word is found by pings of ours, and its work cancelled.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.max_allowed_incoming_connections", MAX_OPEN_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_S * 1000),
]


@dataclass(frozen=True, slots=True)
class RouterEndpoints:
    """Where a router listens."""

    grpc: str
    """host:port of kvhive.v1.Inference."""
    http: str
    """Base URL of the HTTP API."""


class _BoundedHealth(health_aio.HealthServicer):
    """Refuses watchers beyond a number."""

    def __init__(self) -> None:
        super().__init__()
        self._watching = 0

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        if self._watching >= MAX_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MAX_WATCHERS} calls watch health already, the most there may",
            )
        self._watching += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watching -= 1


class Doors:
    """Open once, close once."""

    def __init__(
        self, config: RouterConfig, service: InferenceService, app: ASGIApp, guard: Guard | None = None
    ) -> None:
        """Prepare; without a guard everybody is let in."""
        self._config = config
        self._service = service
        self._http = HttpServer(HttpGuard(guard, app) if guard else app)
        guards = [GrpcGuard(guard)] if guard else []
        malformed = MalformedMessageGuard(REQUEST_TYPES, wire_limits(service.max_context))
        self._health = _BoundedHealth()
        self._healthy: bool | None = None
        self._grpc = grpc.aio.server(
            options=[*_SERVER_OPTIONS, ("grpc.max_receive_message_length", config.max_request_bytes)],
            interceptors=[*guards, FaultGuard(REQUEST_TYPES), malformed],
            maximum_concurrent_rpcs=config.max_concurrent_requests + EXTRA_RPCS,
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(service, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)

    async def open(self) -> RouterEndpoints:
        """Listen. Raises OSError or RuntimeError when a port cannot be had."""
        host = bracketed(self._config.host)
        grpc_port = self._grpc.add_insecure_port(f"{host}:{self._config.grpc_port}")
        await self._grpc.start()
        http_port = await self._http.start(self._config.host, self._config.http_port)
        return RouterEndpoints(f"{host}:{grpc_port}", f"http://{host}:{http_port}")

    async def close(self, grace_s: float) -> None:
        """Refuse what is new, and give what runs on either door `grace_s` seconds to end."""
        await self.set_health(False)
        await asyncio.gather(self._close_grpc(grace_s), self._http.stop(grace_s))

    async def _close_grpc(self, grace_s: float) -> None:
        # Only generations are waited for: a client that watches health has an open call for ever.
        await self._service.drain(grace_s)
        await self._grpc.stop(0)

    async def set_health(self, serving: bool) -> None:
        """Tell grpc.health.v1, and those who watch it, whether a request would find a worker."""
        if serving == self._healthy:
            return
        self._healthy = serving
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)
