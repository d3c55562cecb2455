"""OpenAI's completions and models over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvhive.proto.errors import InvalidRequest, KvhiveError
from kvhive.router.frontend import ModelInfo, TokenizingFrontend
from kvhive.router.http_body import Bodies, BodyTimeout
from kvhive.router.http_door import Endpoint
from kvhive.router.http_headers import cache_key_of
from kvhive.router.openai.chat_request import parse_chat_completion
from kvhive.router.openai.exchange import CompletionExchange
from kvhive.router.openai.field_policy import ignored_header
from kvhive.router.openai.fields import CompletionRequest, with_cache_key
from kvhive.router.openai.response import (
    AnswerShape,
    ChatShape,
    error_response,
    model_body,
    model_not_found,
)
from kvhive.router.openai.text_request import parse_text_completion
from kvhive.router.openai.text_response import TextShape
from kvhive.router.openai.tokens import parse_detokenize, parse_tokenize, tokenized
from kvhive.router.request import check_request_id


class OpenAIDoor:
    """The endpoints, with what they share. See HttpDoor."""

    def __init__(
        self,
        frontend: TokenizingFrontend,
        bodies: Bodies,
        now: Callable[[], float],
        timed_out: Callable[[str], None],
    ) -> None:
        self._timed_out = timed_out
        self._frontend = frontend
        self._bodies = bodies
        self._now = now

    def routes(self) -> list[Route]:
        """See HttpDoor."""
        return [
            *(Route(path, end, methods=["POST"]) for path, end in self.completions().items()),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.get_model),
        ]

    def completions(self) -> Mapping[str, Endpoint]:
        """See HttpDoor."""
        return {
            "/v1/chat/completions": self.chat_completions,
            "/v1/completions": self.text_completions,
        }

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._complete(request, parse_chat_completion, ChatShape)

    async def text_completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._complete(request, parse_text_completion, TextShape)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""

        async def answer(request_id: str) -> Response:
            asked = await self._bodies.read(request, parse_tokenize)
            model = self._model(asked.model)
            if model is None:
                return model_not_found(asked.model)
            body = await tokenized(self._frontend, asked, model)
            return JSONResponse(body, headers=ignored_header(asked.ignored))

        return await self._guarded(request, answer)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""

        async def answer(request_id: str) -> Response:
            asked = await self._bodies.read(request, parse_detokenize)
            if self._model(asked.model) is None:
                return model_not_found(asked.model)
            text = await self._frontend.detokenize(asked.token_ids, asked.model)
            return JSONResponse({"prompt": text}, headers=ignored_header(asked.ignored))

        return await self._guarded(request, answer)

    async def _complete(
        self,
        request: Request,
        parse: Callable[[dict[str, Any], str], CompletionRequest],
        shape: Callable[[str, str, int], AnswerShape],
    ) -> Response:
        async def answer(request_id: str) -> Response:
            asked = await self._bodies.read(request, lambda fields: parse(fields, request_id))
            asked = with_cache_key(asked, cache_key_of(request.headers))
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

        return await self._guarded(request, answer)

    async def _guarded(self, request: Request, answer: Callable[[str], Awaitable[Response]]) -> Response:
        """Answer, given the request's id; an error on the way becomes a whole response."""
        request_id = request.headers.get("x-request-id", "")
        try:
            check_request_id("x-request-id", request_id)
            return await answer(request_id)
        except InvalidRequest as error:
            return error_response(error, request_id if error.field != "x-request-id" else "")
        except KvhiveError as error:
            if isinstance(error, BodyTimeout):
                self._timed_out("body")
            return error_response(error, request_id)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [model_body(m) for m in self._frontend.models()]})

    async def get_model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        name = request.path_params["name"]
        model = self._model(name)
        return model_not_found(name) if model is None else JSONResponse(model_body(model))

    def _model(self, name: str) -> ModelInfo | None:
        """Return the named model, the first one for an empty name, or None."""
        return next((model for model in self._frontend.models() if name in ("", model.name)), None)
