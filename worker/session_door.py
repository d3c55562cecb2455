"""Where routers' sessions come in: a port, and a ticket for each session that gRPC has let in."""

from __future__ import annotations

import asyncio
import hmac
import secrets

from kvhive.proto.frames import FrameConnection
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.session import Session

TICKET_BYTES = 32
TICKET_S = 5.0
"""Seconds in which a ticket, and a stranger's silence, must come to an end."""

MAX_TICKETS = 64
"""Tickets that nobody has used yet; beyond, the oldest is void."""

MAX_STRANGERS = 64
"""Connections that have not shown a ticket yet; one more, and the oldest is hung up on."""


class SessionDoor:
    """Listens from `open` to `close`. Lives on one event loop."""

    def __init__(self) -> None:
        self._sessions: set[Session] = set()
        self._tickets: dict[bytes, tuple[Session, float]] = {}
        self._strangers: dict[FrameConnection, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None

    @property
    def sessions(self) -> int:
        """Sessions that have not ended."""
        return len(self._sessions)

    async def open(self, host: str) -> None:
        """Listen on a free port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._admit, host.strip("[]"), 0)

    def close(self) -> None:
        """Listen no more, and end all sessions."""
        if self._server is not None:
            self._server.close()
        for stranger in list(self._strangers):
            stranger.close("the worker is stopping")
        for session in list(self._sessions):
            session.end()

    def offer(self, session: Session) -> worker_pb2.SessionOffer:
        """Make a ticket for a session, which lasts until `forget`."""
        assert self._server is not None, "offered before it was opened"
        self._sessions.add(session)
        while len(self._tickets) >= MAX_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._tickets[ticket] = session, asyncio.get_running_loop().time() + TICKET_S
        port = self._server.sockets[0].getsockname()[1]
        return worker_pb2.SessionOffer(port=port, ticket=ticket)

    def forget(self, session: Session) -> None:
        """It is over, and its ticket void."""
        self._sessions.discard(session)
        for ticket, (whose, _) in list(self._tickets.items()):
            if whose is session:
                del self._tickets[ticket]

    def _admit(self) -> FrameConnection:
        loop = asyncio.get_running_loop()
        connection = FrameConnection(lambda _: None, lambda _: None)
        connection.limit = TICKET_BYTES
        late = loop.call_later(TICKET_S, connection.close, "no ticket in time")

        def gone(_: str) -> None:
            late.cancel()
            self._strangers.pop(connection, None)

        def shown(ticket: bytes) -> None:
            gone("")
            session = self._redeem(ticket)
            if session is None:
                connection.close("a ticket that is not one")
            else:
                session.connect(connection)

        connection.receive, connection.ended = shown, gone
        self._strangers[connection] = None
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.close(f"more than {MAX_STRANGERS} connections without a ticket")
        return connection

    def _redeem(self, shown: bytes) -> Session | None:
        now = asyncio.get_running_loop().time()
        for ticket, (_, until) in list(self._tickets.items()):
            if until < now:
                del self._tickets[ticket]
        for ticket in list(self._tickets):
            if hmac.compare_digest(ticket, shown):
                return self._tickets.pop(ticket)[0]
        return None
