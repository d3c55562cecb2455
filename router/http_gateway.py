"""uvicorn as a part of a running event loop: no signal handlers, no process of its own, bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from kvhive.router.http_protocol import BoundedProtocol

MAX_CONNECTIONS = 2048
"""Beyond this uvicorn answers 503 by itself; the limit on requests is lower and answers 429."""
KEEP_ALIVE_S = 30
UNACKNOWLEDGED_S = 60
"""After this long without an acknowledgement, or with a window of zero, the kernel drops a connection."""
CANCEL_S = 2.0
"""How long responses that were cut off at shutdown may take to say so."""


class HttpServer:
    """Serves one ASGI application. Start once, stop once."""

    def __init__(self, app: ASGIApp, max_connections: int = MAX_CONNECTIONS) -> None:
        config = uvicorn.Config(
            app,
            loop="none",
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level=logging.ERROR,  # what strangers send that is no HTTP is no news
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=max_connections,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _EmbeddedServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Bind and serve; return the port, which for port 0 is a free one. Raises OSError."""
        assert self._task is None, "started twice"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        infos = await asyncio.get_running_loop().getaddrinfo(
            host, port, family=family, type=socket.SOCK_STREAM
        )
        listener = socket.create_server(infos[0][4][:2], family=family, backlog=MAX_CONNECTIONS)
        # Accepted sockets inherit it. asyncio sets it only where a socket names its protocol, which those do
        # not; and without it a token waits for the acknowledgement of the one before, for 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted sockets inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000)
        bound = int(listener.getsockname()[1])
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            ready.cancel()
            listener.close()
            await self._task
            raise OSError(f"the HTTP server ended while starting on {host}:{port}")
        return bound

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more, let responses finish for `grace_s`, then cancel them."""
        if self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        await self._task
        self._task = None
        cut_off = set(self._server.server_state.tasks)
        if cut_off:
            await asyncio.wait(cut_off, timeout=CANCEL_S)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


class _EmbeddedServer(uvicorn.Server):
    """A server that leaves the process' signals to their owner and says when it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()
