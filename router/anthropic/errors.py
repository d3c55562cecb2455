"""Errors in Anthropic's shape, under the statuses that its clients know what to do with."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from kvhive.proto.errors import InvalidRequest, KvhiveError, Overloaded, TimedOut, Unavailable
from kvhive.router.http_body import BodyTimeout, BodyTooLarge
from kvhive.router.http_headers import headers_after

OVERLOADED = 529
"""A status of Anthropic's own: clients try again, and do not take it for a limit of their account."""
REQUEST_ID_HEADER = "request-id"
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""What the body calls each status."""


def error_body(status: int, message: str, request_id: str = "") -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    error = {"type": KINDS.get(status, "api_error"), "message": message}
    return {"type": "error", "error": error, "request_id": request_id or None}


def status_of(error: KvhiveError) -> int:
    """Return the HTTP status of an error of ours."""
    match error:
        case InvalidRequest():
            return 400
        case BodyTooLarge():
            return 413
        case BodyTimeout():
            return 408
        case Overloaded():
            return OVERLOADED
        case Unavailable():
            return 503
        case TimedOut():
            return 504
    return 500


def describe_error(error: KvhiveError, request_id: str = "") -> dict[str, Any]:
    """Return the body for an error of ours."""
    status = status_of(error)
    return error_body(status, "internal error" if status == 500 else str(error), request_id)


def error_response(error: KvhiveError, request_id: str = "") -> JSONResponse:
    """Return an error as a whole response; one that may be retried says when."""
    status = status_of(error)
    headers = {REQUEST_ID_HEADER: request_id} if request_id else {}
    return JSONResponse(describe_error(error, request_id), status, headers | headers_after(error))


def model_not_found(name: str, request_id: str = "") -> JSONResponse:
    """Return the 404 for a model that is not served."""
    headers = {REQUEST_ID_HEADER: request_id} if request_id else {}
    message = f"model: {name[:128]!a} is not served here"
    return JSONResponse(error_body(404, message, request_id), 404, headers)
