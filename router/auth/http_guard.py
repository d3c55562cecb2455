"""The guard at the HTTP door: an ASGI application around another one."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvhive.router.anthropic import errors as anthropic_errors
from kvhive.router.anthropic.api import is_asked_by
from kvhive.router.auth.guard import Forbidden, Guard, Refused
from kvhive.router.auth.principal import asking
from kvhive.router.openai.response import error_body


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
            await _refusal(scope, error)(scope, receive, send)
            return
        asking.set(principal)
        await self._app(scope, receive, send)


def _refusal(scope: Scope, error: Refused) -> JSONResponse:
    status = 403 if isinstance(error, Forbidden) else 401
    # The rest of the request is not read, so the connection cannot be used again.
    headers = {"connection": "close"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if is_asked_by(scope):
        body = anthropic_errors.error_body(status, str(error))
    elif status == 403:
        body = error_body(str(error), "permission_error", code="permission_denied")
    else:
        body = error_body(str(error), "invalid_request_error", code="invalid_api_key")
    return JSONResponse(body, status, headers)
