"""HTTP/1.1 as the server speaks it: uvicorn's protocol over httptools, bounded in what is not a body, and in
how long a request may take to come.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvhive.router.http_body import BODY_TIMEOUT_S

MAX_OPEN_CONNECTIONS = 4096
"""One more is closed at once: some 40 kB each, and a file descriptor, whatever comes through them."""
HEAD_TIMEOUT_S = 20.0
"""Longest from a connection, or a request's first byte, to the end of its headers."""
REST_TIMEOUT_S = BODY_TIMEOUT_S + 5.0
"""And from there to its end, for those whose body nobody reads."""
MAX_HEADERS = 256
MAX_HEADER_BYTES = 64 * 1024
"""Of a request's line, headers and trailers, and of the framing of its body beyond FRAMING_BYTES a chunk."""
FRAMING_BYTES = 32
BEGINNING_S = 0.02
"""Longest that the beginning of a stream of events waits for the first one."""
MAX_BEGINNING_BYTES = 64 * 1024
"""Of them together; with more, all is written at once."""
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a request that has more than MAX_HEADER_BYTES of anything but body, complete or not.

    One request at a time: what a client sends before it has its answer is dropped, and the connection ends
    with that answer. The server would stop reading instead, and not notice that the client has gone.
    """

    _overhead = 0
    """Bytes of the present message that were not body."""
    _refusal = ""
    """What is wrong with the present message, where the parser would not know."""
    _deaf = False
    """What comes is dropped."""
    _due: asyncio.TimerHandle | None = None
    """When the head, or the rest, must have come; None between two requests."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin a connection."""
        super().connection_made(cast(asyncio.Transport, HeadWithBody(cast(asyncio.Transport, transport))))
        if len(self.connections) > MAX_OPEN_CONNECTIONS:
            self.transport.abort()
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End it."""
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in what a client sent."""
        if self._deaf:
            return
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers must have at most {MAX_HEADER_BYTES} bytes.")
        elif self._due is None and self.timeout_keep_alive_task is None and not self._answering:
            self._wait_for_head()  # empty lines, say: no message has begun, and the server waits no more

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong, and close; where an answer is on its way, after it."""
        if not self._deaf:
            super().send_400_response(self._refusal or msg)

    def on_message_begin(self) -> None:
        """Take in the beginning of a request."""
        if self._answering:
            self._deaf, self.cycle.keep_alive = True, False
            self._refuse("One request at a time.")
        super().on_message_begin()
        self._wait_for_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take in a header, or a trailer."""
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(f"There must be at most {MAX_HEADERS} headers.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Take in the end of the headers."""
        super().on_headers_complete()
        self._wait_no_more()
        self._due = self.loop.call_later(REST_TIMEOUT_S, self._too_slow)

    def on_body(self, body: bytes) -> None:
        """Take in a part of the body."""
        self._overhead = max(0, self._overhead - len(body) - FRAMING_BYTES)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take in the end of a request; what follows is the next one."""
        self._overhead = 0
        self._wait_no_more()
        super().on_message_complete()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, why: str) -> None:
        """End parsing, in a callback of the parser."""
        self._refusal = why
        raise ValueError(why)

    def _wait_for_head(self) -> None:
        self._wait_no_more()
        self._due = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _wait_no_more(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _too_slow(self) -> None:
        """Close: who takes too long to ask must hold nothing. Whom we do not read is not slow."""
        if self.flow.read_paused:
            self._due = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)
        else:
            self.transport.close()


class HeadWithBody:
    """A transport that sends a response's head with what is written after it.

    Each write is a system call of ours, and wakes the client. A head that nothing follows, as in answer to
    HEAD, goes at the end of the loop's turn. A stream of events begins with what its client knows anyway, so
    that goes with the first event that comes later, if it comes within BEGINNING_S: the worker is asked
    before anything is written.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held = b""
        self._streams = False
        """Whether what is held begins a stream of events."""
        self._waiting: asyncio.TimerHandle | None = None
        """Until the first event is waited for no longer."""

    def __getattr__(self, name: str) -> Any:
        """Return the transport's own."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send it; a head with what comes next."""
        if data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n") and data[9:10] != b"1":
            if not self._held:
                self._loop.call_soon(self._end_turn)
            self._held += data
            self._streams = b"text/event-stream" in data
        elif not self._held:
            self._transport.write(data)
        else:
            self._held += data
            first = not self._streams or self._waiting is not None
            if first or len(self._held) > MAX_BEGINNING_BYTES:
                self._send_held()

    def close(self) -> None:
        """Close, having sent what was written."""
        self._send_held()
        self._transport.close()

    def _end_turn(self) -> None:
        if not self._streams or self._held.endswith(_LAST_CHUNK):
            self._send_held()
        elif self._held and self._waiting is None:
            self._waiting = self._loop.call_later(BEGINNING_S, self._send_held)

    def _send_held(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        held, self._held = self._held, b""
        if held:
            self._transport.write(held)
