"""Messages on a plain socket: each is its length, four bytes with the highest first, and then itself."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from kvhive.proto.transport import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

LINGER_S = 1.0
"""Longest that an end waits for what was sent to be taken."""

_HEAD_BYTES = 4


class FrameConnection(asyncio.Protocol):
    """One end of such a socket. Whole frames are handed on in the callback that read them."""

    def __init__(
        self,
        receive: Callable[[bytes], None],
        ended: Callable[[str], None],
        writable: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin. `receive` takes a frame, `ended` hears why it is over, once, and `writable` that the other
        end reads again."""
        self.receive, self.ended, self.writable = receive, ended, writable
        self.limit = MAX_MESSAGE_BYTES
        self.paused = False
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._unread = bytearray()
        self._why = "the connection ended"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        if self._closed:  # before it was there
            transport.abort()
            return
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._unread += data
        begin = 0
        while self._transport is not None and len(self._unread) - begin >= _HEAD_BYTES:
            body = begin + _HEAD_BYTES
            size = int.from_bytes(self._unread[begin:body])
            if size > self.limit:
                self.close(f"a frame of {size} bytes: at most {self.limit}")
                return
            if len(self._unread) < body + size:
                break
            begin = body + size
            with memoryview(self._unread) as unread:
                frame = bytes(unread[body:begin])
            self.receive(frame)
        del self._unread[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self.ended(f"{self._why}: {exc}" if exc else self._why)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self.paused = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self.paused = False
        self.writable()

    def send(self, message: bytes) -> None:
        """Write a frame. Nothing where it is over. What is written while `paused` costs memory."""
        if self._transport is not None:
            self._transport.write(len(message).to_bytes(_HEAD_BYTES) + message)

    def close(self, why: str = "") -> None:
        """End: for a reason at once, else when all that was sent is out, or LINGER_S later."""
        transport, self._transport, self._closed = self._transport, None, True
        self._why = why or self._why
        if transport is not None and why:
            log.info("hung up on %s: %s", transport.get_extra_info("peername"), why)
            transport.abort()
        elif transport is not None:
            transport.close()
            if transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(LINGER_S, transport.abort)
