"""The guard at the HTTP door: an ASGI application around another one."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvhive.router.auth.guard import Forbidden, Guard, Refused
from kvhive.router.auth.principal import asking
from kvhive.router.openai.response import error_body

ANTHROPIC_PATH = "/v1/messages"
"""Below it, errors are in Anthropic's words."""


class HttpGuard:
    """Lets through who may ask; nothing is read of the others' bodies."""

    def __init__(self, guard: Guard, app: ASGIApp) -> None:
        self._guard = guard
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        assert scope["type"] == "http", "the server speaks nothing else"
        try:
            principal = self._guard.admit(scope["path"], scope["headers"])
        except Refused as error:
            await _refusal(scope["path"], error)(scope, receive, send)
            return
        asking.set(principal)
        await self._app(scope, receive, send)


def _refusal(path: str, error: Refused) -> JSONResponse:
    status = 403 if isinstance(error, Forbidden) else 401
    # The rest of the request is not read, so the connection cannot be used again.
    headers = {"connection": "close"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(_body(path, status, str(error)), status, headers)


def _body(path: str, status: int, message: str) -> dict[str, Any]:
    if path.startswith(ANTHROPIC_PATH):
        kind = "permission_error" if status == 403 else "authentication_error"
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
    if status == 403:
        return error_body(message, "permission_error", code="permission_denied")
    return error_body(message, "invalid_request_error", code="invalid_api_key")
