"""HTTP/1.1 as the server speaks it: uvicorn's protocol over httptools, bounded in what is not a body."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 1024
"""Of a request's line, headers and trailers, and of the framing of its body beyond FRAMING_BYTES a chunk."""
FRAMING_BYTES = 32


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a request that has more than MAX_HEADER_BYTES of anything but body, complete or not."""

    _overhead = 0
    """Bytes of the present message that were not body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin a connection."""
        super().connection_made(cast(asyncio.Transport, HeadWithBody(cast(asyncio.Transport, transport))))

    def data_received(self, data: bytes) -> None:
        """Take in what a client sent."""
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers must have at most {MAX_HEADER_BYTES} bytes.")

    def on_body(self, body: bytes) -> None:
        """Take in a part of the body."""
        self._overhead = max(0, self._overhead - len(body) - FRAMING_BYTES)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take in the end of a request; what follows is the next one."""
        self._overhead = 0
        super().on_message_complete()


class HeadWithBody:
    """A transport that sends a response's head with what is written right after it.

    Each write is a system call of ours, and wakes the client. A head that nothing follows, as in answer to
    HEAD, goes at the end of the loop's turn.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        """Return the transport's own."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send it; a head with what comes next."""
        if data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n") and data[9:10] != b"1":
            if not self._head:
                self._loop.call_soon(self._send_head)
            self._head += data
        else:
            self._transport.write(self._head + data)
            self._head = b""

    def close(self) -> None:
        """Close, having sent what was written."""
        self._send_head()
        self._transport.close()

    def _send_head(self) -> None:
        if self._head:
            self.write(b"")
