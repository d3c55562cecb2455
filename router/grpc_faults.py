"""Answers a fault of ours with INTERNAL and no more, and logs it.

gRPC itself would answer UNKNOWN, and with it what was raised.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import aclosing
from typing import Any

import grpc

from kvhive.router.grpc_errors import end, error_info

log = logging.getLogger(__name__)


class FaultGuard(grpc.aio.ServerInterceptor):
    """Wraps the handlers of the given methods, by full name. What they abort themselves stays as it is."""

    def __init__(self, methods: Container[str]) -> None:
        self._methods = methods

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Replace a known method's handler by one whose faults are ours to tell."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or method not in self._methods:
            return handler
        ways = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_streaming(handler.unary_stream, method), *ways)
        return grpc.unary_unary_rpc_method_handler(_single(handler.unary_unary, method), *ways)


def _streaming(behaviour: Any, method: str) -> Any:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AbortError as error:
            del request
            raise _without_frames(error) from None
        except grpc.aio.InternalError:  # gRPC could say no more: the client went while it was refused
            raise asyncio.CancelledError from None
        except Exception:  # the outermost edge of a call
            await _tell(context, method)

    return guarded


def _single(behaviour: Any, method: str) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except grpc.aio.AbortError as error:
            del request
            raise _without_frames(error) from None
        except grpc.aio.InternalError:  # gRPC could say no more: the client went while it was refused
            raise asyncio.CancelledError from None
        except Exception:  # the outermost edge of a call
            await _tell(context, method)

    return guarded


def _without_frames(error: grpc.aio.AbortError) -> grpc.aio.AbortError:
    """Return it as if nothing had led to it.

    gRPC keeps it with the call; it would keep the frames that it came through, and they the call and its
    request: megabytes, until Python looks for cycles.
    """
    error.__context__ = None
    return error.with_traceback(None)


async def _tell(context: Any, method: str) -> None:
    log.exception("a fault of ours ended a call method=%s", method)
    await end(context, grpc.StatusCode.INTERNAL, "internal error", (error_info("internal"),))
