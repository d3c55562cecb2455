"""One dialect of the HTTP door: the contract of router/openai/ and its siblings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]


class HttpDoor(Protocol):
    """The endpoints of one dialect."""

    def routes(self) -> list[Route]:
        """Return every route, the completions among them."""
        ...

    def completions(self) -> Mapping[str, Endpoint]:
        """Return, by path, what POST requests in great numbers ask: answered around Starlette's layers."""
        ...
