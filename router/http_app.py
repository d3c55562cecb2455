"""The HTTP door put together: the dialects, health, readiness and metrics, as one ASGI application."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvhive.router.anthropic import errors as anthropic_errors
from kvhive.router.anthropic.api import AnthropicDoor, is_asked_by
from kvhive.router.frontend import TokenizingFrontend
from kvhive.router.http_body import Bodies
from kvhive.router.http_door import Endpoint, HttpDoor
from kvhive.router.http_exchange import HttpExchange
from kvhive.router.openai.api import OpenAIDoor
from kvhive.router.openai.response import error_body
from kvhive.router.openapi import openapi_document

DEFAULT_MAX_BODY_BYTES = 16 * 1024 * 1024


def create_app(
    frontend: TokenizingFrontend,
    registry: CollectorRegistry,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    now: Callable[[], float] = time.time,
    timed_out: Callable[[str], None] = lambda cause: None,
) -> ASGIApp:
    """Return the ASGI application.

    `now` is the wall clock that answers are dated with, in seconds; `timed_out` hears, in a word, which time
    was over where a door itself gave up.
    """
    bodies = Bodies(max_body_bytes)
    dialects: list[HttpDoor] = [  # Anthropic's first: some of its routes are for its clients alone
        AnthropicDoor(frontend, bodies, timed_out),
        OpenAIDoor(frontend, bodies, now, timed_out),
    ]
    everything = Starlette(
        routes=[
            *_OperatorDoor(frontend, registry).routes(),
            *(route for door in dialects for route in door.routes()),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
    )
    return _ShortWay({path: end for door in dialects for path, end in door.completions().items()}, everything)


class _OperatorDoor:
    """What whoever runs the cluster asks, and what is of both dialects."""

    def __init__(self, frontend: TokenizingFrontend, registry: CollectorRegistry) -> None:
        self._frontend = frontend
        self._registry = registry

    def routes(self) -> list[Route]:
        """Return every route."""
        return [
            Route("/healthz", self.health),
            Route("/health", self.health),  # as vLLM calls it, and what measures servers asks first
            Route("/readyz", self.readiness),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.describe),
        ]

    async def health(self, request: Request) -> Response:
        """GET /healthz: the process answers."""
        return PlainTextResponse("ok")

    async def readiness(self, request: Request) -> Response:
        """GET /readyz: a request sent now would find a worker."""
        ready = self._frontend.ready()
        return PlainTextResponse("ready" if ready else "no worker is serving", 200 if ready else 503)

    async def describe(self, request: Request) -> Response:
        """GET /openapi.json."""
        return JSONResponse(openapi_document(self._frontend.models()[0]))

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, in Prometheus' text format."""
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})


class _ShortWay:
    """Answers completions itself and asks Starlette for all else: its layers cost a tenth of a short one."""

    def __init__(self, completions: Mapping[str, Endpoint], everything: ASGIApp) -> None:
        self._completions = completions
        self._everything = everything

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        endpoint = self._completions.get(scope["path"]) if scope.get("method") == "POST" else None
        if endpoint is None:
            await self._everything(scope, receive, send)
            return
        request, response = Request(scope, receive), None
        try:
            response = await endpoint(request)
            await response(scope, receive, send)
        except Exception as error:  # as Starlette does: answered while that is possible, logged by the server
            if response is None or (isinstance(response, HttpExchange) and not response.begun):
                await (await _internal_error(request, error))(scope, receive, send)
            raise


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, headers = error.status_code, dict(error.headers or {})
    if is_asked_by(request.scope):
        return JSONResponse(anthropic_errors.error_body(status, error.detail), status, headers)
    return JSONResponse(error_body(error.detail, "invalid_request_error"), status, headers)


async def _internal_error(request: Request, error: Exception) -> Response:
    """Answer for a fault of ours; Starlette raises it again, so that the server logs it."""
    if is_asked_by(request.scope):
        return JSONResponse(anthropic_errors.error_body(500, "internal error"), 500)
    return JSONResponse(error_body("internal error", "server_error"), 500)
