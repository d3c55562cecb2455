"""The guard at the gRPC door: an interceptor before all others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc

from kvhive.router.auth.guard import Forbidden, Guard, Refused
from kvhive.router.auth.principal import asking
from kvhive.router.grpc_errors import end, error_info


class GrpcGuard(grpc.aio.ServerInterceptor):
    """Lets through who may call; nothing is read of the others' messages."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Ask the guard, by the method's full name."""
        try:
            principal = self._guard.admit(
                handler_call_details.method, _headers(handler_call_details.invocation_metadata)
            )
        except Refused as error:
            return _refusal(error)
        asking.set(principal)
        return await continuation(handler_call_details)


def _headers(metadata: Any) -> Iterator[tuple[bytes, bytes]]:
    for name, value in metadata or ():
        yield name.encode(), value if isinstance(value, bytes) else value.encode()


def _refusal(error: Refused) -> Any:
    """Return a handler that ends the call. As one of streams it gets no message before it asks for one."""
    code = (
        grpc.StatusCode.PERMISSION_DENIED if isinstance(error, Forbidden) else grpc.StatusCode.UNAUTHENTICATED
    )

    async def refuse(requests: Any, context: Any) -> None:
        await end(context, code, str(error), (error_info(code.name),))

    return grpc.stream_stream_rpc_method_handler(refuse)
