"""The HTTP door: OpenAI's completions and models, health, readiness and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvhive.proto.errors import InvalidRequest, KvhiveError
from kvhive.router.frontend import ModelInfo, TokenizingFrontend
from kvhive.router.http_body import OFF_LOOP_BYTES, BodyTimeout, parse_object, read_body
from kvhive.router.openai.chat_request import parse_chat_completion
from kvhive.router.openai.exchange import CompletionExchange
from kvhive.router.openai.fields import CACHE_KEY_HEADER, CompletionRequest, with_cache_key
from kvhive.router.openai.response import (
    AnswerShape,
    ChatShape,
    error_body,
    error_response,
    model_body,
    model_not_found,
)
from kvhive.router.openai.text_request import parse_text_completion
from kvhive.router.openai.text_response import TextShape
from kvhive.router.request import check_request_id

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
    was over where the door itself gave up.
    """
    door = _Door(frontend, registry, max_body_bytes, now, timed_out)
    everything = Starlette(
        routes=[
            Route("/v1/chat/completions", door.chat_completions, methods=["POST"]),
            Route("/v1/completions", door.text_completions, methods=["POST"]),
            Route("/v1/models", door.list_models),
            Route("/v1/models/{name:path}", door.get_model),
            Route("/healthz", door.health),
            Route("/readyz", door.readiness),
            Route("/metrics", door.metrics),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
    )
    completions = {
        "/v1/chat/completions": door.chat_completions,
        "/v1/completions": door.text_completions,
    }
    return _ShortWay(completions, everything)


class _ShortWay:
    """Answers completions itself and asks Starlette for all else: its layers cost a tenth of a short one."""

    def __init__(
        self, completions: Mapping[str, Callable[[Request], Awaitable[Response]]], everything: ASGIApp
    ) -> None:
        self._completions = completions
        self._everything = everything

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        endpoint = self._completions.get(scope["path"]) if scope.get("method") == "POST" else None
        if endpoint is None:
            await self._everything(scope, receive, send)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        request = Request(scope, receive)
        try:
            response = await endpoint(request)
            await response(scope, receive, noted)
        except Exception as error:  # as Starlette does: answered while that is possible, logged by the server
            if not started:
                await (await _internal_error(request, error))(scope, receive, send)
            raise


class _Door:
    """The endpoints, with what they share."""

    def __init__(
        self,
        frontend: TokenizingFrontend,
        registry: CollectorRegistry,
        max_body_bytes: int,
        now: Callable[[], float],
        timed_out: Callable[[str], None],
    ) -> None:
        self._timed_out = timed_out
        self._frontend = frontend
        self._registry = registry
        self._max_body_bytes = max_body_bytes
        self._now = now

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._complete(request, parse_chat_completion, ChatShape)

    async def text_completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._complete(request, parse_text_completion, TextShape)

    async def _complete(
        self,
        request: Request,
        parse: Callable[[dict[str, Any], str], CompletionRequest],
        shape: Callable[[str, str, int], AnswerShape],
    ) -> Response:
        request_id = request.headers.get("x-request-id", "")
        try:
            check_request_id("x-request-id", request_id)
            body = await read_body(request, self._max_body_bytes)
            asked = await _off_loop_if_large(body, lambda: parse(parse_object(body), request_id))
            asked = with_cache_key(asked, request.headers.get(CACHE_KEY_HEADER, ""))
        except InvalidRequest as error:
            return error_response(error, request_id if error.field != "x-request-id" else "")
        except KvhiveError as error:
            if isinstance(error, BodyTimeout):
                self._timed_out("body")
            return error_response(error, request_id)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        model = self._model(asked.request.model)
        if model is None:
            return model_not_found(asked.request.model)
        created = int(self._now())
        return CompletionExchange(
            self._frontend,
            asked,
            lambda known: shape(known, model.name, created),
            lambda: self._timed_out("slow_reader"),
        )

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [model_body(m) for m in self._frontend.models()]})

    async def get_model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        name = request.path_params["name"]
        model = self._model(name)
        return model_not_found(name) if model is None else JSONResponse(model_body(model))

    async def health(self, request: Request) -> Response:
        """GET /healthz: the process answers."""
        return PlainTextResponse("ok")

    async def readiness(self, request: Request) -> Response:
        """GET /readyz: a request sent now would find a worker."""
        ready = self._frontend.ready()
        return PlainTextResponse("ready" if ready else "no worker is serving", 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, in Prometheus' text format."""
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    def _model(self, name: str) -> ModelInfo | None:
        """Return the named model, the first one for an empty name, or None."""
        return next((model for model in self._frontend.models() if name in ("", model.name)), None)


async def _off_loop_if_large(body: bytes, parse: Callable[[], CompletionRequest]) -> CompletionRequest:
    return parse() if len(body) <= OFF_LOOP_BYTES else await asyncio.to_thread(parse)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(
        error_body(error.detail, "invalid_request_error"), error.status_code, dict(error.headers or {})
    )


async def _internal_error(request: Request, error: Exception) -> Response:
    """Answer for a fault of ours; Starlette raises it again, so that the server logs it."""
    return JSONResponse(error_body("internal error", "server_error"), 500)
