"""Anthropic's messages, and models as its clients ask for them, over HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from kvhive.proto.errors import InvalidRequest, KvhiveError
from kvhive.router.anthropic.errors import error_response, model_not_found
from kvhive.router.anthropic.exchange import MessageExchange, head, spelled
from kvhive.router.anthropic.request import MessagesRequest, parse_count, parse_messages
from kvhive.router.anthropic.response import model_body, models_page
from kvhive.router.frontend import ModelInfo, TokenizingFrontend
from kvhive.router.http_body import Bodies, BodyTimeout
from kvhive.router.http_door import Endpoint
from kvhive.router.http_headers import cache_key_of
from kvhive.router.request import check_request_id

VERSION_HEADER = b"anthropic-version"
"""Which Anthropic's clients send, and nobody else."""


def is_asked_by(scope: Scope) -> bool:
    """Tell whether a request is one that this dialect answers, errors included."""
    if scope["path"].startswith("/v1/messages"):
        return True
    return any(name == VERSION_HEADER for name, _ in scope["headers"])


class AnthropicDoor:
    """The endpoints, with what they share. See HttpDoor."""

    def __init__(
        self, frontend: TokenizingFrontend, bodies: Bodies, timed_out: Callable[[str], None]
    ) -> None:
        self._frontend = frontend
        self._bodies = bodies
        self._timed_out = timed_out

    def routes(self) -> list[Route]:
        """See HttpDoor. Those of models are for Anthropic's clients alone: put them before others'."""
        return [
            *(Route(path, end, methods=["POST"]) for path, end in self.completions().items()),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            _ClientsRoute("/v1/models", self.list_models),
            _ClientsRoute("/v1/models/{name:path}", self.get_model),
        ]

    def completions(self) -> Mapping[str, Endpoint]:
        """See HttpDoor."""
        return {"/v1/messages": self.messages}

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages."""

        def parse(fields: dict[str, Any], request_id: str) -> MessagesRequest:
            return parse_messages(fields, request_id, cache_key_of(request.headers))

        asked = await self._asked(request, parse)
        if isinstance(asked, Response):
            return asked
        model = self._model(asked.request.model)
        if model is None:
            return model_not_found(asked.request.model, asked.request.request_id)
        return MessageExchange(self._frontend, asked, model.name, lambda: self._timed_out("slow_reader"))

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        asked = await self._asked(request, parse_count)
        if isinstance(asked, Response):
            return asked
        model = self._model(asked.request.model)
        if model is None:
            return model_not_found(asked.request.model, asked.request.request_id)
        try:
            ids = await self._frontend.tokenize(asked.request.prompt, model.name)
        except KvhiveError as error:
            return error_response(spelled(error, asked), asked.request.request_id)
        return JSONResponse({"input_tokens": len(ids)}, headers=head(asked))

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse(models_page(self._frontend.models()))

    async def get_model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        name = request.path_params["name"]
        model = self._model(name)
        return model_not_found(name) if model is None else JSONResponse(model_body(model))

    async def _asked(
        self, request: Request, parse: Callable[[dict[str, Any], str], MessagesRequest]
    ) -> MessagesRequest | Response:
        """Read a request, or say no to it."""
        request_id = request.headers.get("x-request-id", "") or f"req-{secrets.token_hex(12)}"
        try:
            check_request_id("x-request-id", request_id)
            return await self._bodies.read(request, lambda fields: parse(fields, request_id))
        except InvalidRequest as error:
            return error_response(error, request_id if error.field != "x-request-id" else "")
        except KvhiveError as error:
            if isinstance(error, BodyTimeout):
                self._timed_out("body")
            return error_response(error, request_id)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it

    def _model(self, name: str) -> ModelInfo | None:
        """Return the named model, the first one for an empty name, or None."""
        return next((model for model in self._frontend.models() if name in ("", model.name)), None)


class _ClientsRoute(Route):
    """A route that is there for Anthropic's clients, and for others may be another dialect's."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See Route."""
        if scope["type"] == "http" and is_asked_by(scope):
            return super().matches(scope)
        return Match.NONE, {}
