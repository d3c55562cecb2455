"""Messages on a plain socket: whole, in order, bounded, and ended within a bounded time."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhive.proto import frames
from kvhive.proto.frames import FrameConnection


class Ends:
    """A connection of ours, and the raw socket at its other end."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.connection = FrameConnection(self.frames.append, self._over.set_result)
        self.raw: socket.socket

    async def until_over(self) -> str:
        """Return why: it is told once, or setting the result again would fail."""
        return await asyncio.wait_for(asyncio.shield(self._over), 10)


@contextlib.asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    both, listener = Ends(), socket.create_server(("127.0.0.1", 0))
    try:
        await asyncio.get_running_loop().create_connection(lambda: both.connection, *listener.getsockname())
        both.raw, _ = listener.accept()
        both.raw.setblocking(False)
        yield both
    finally:
        both.connection.close("the test is over")
        both.raw.close()
        listener.close()


def framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


class Nowhere(asyncio.Transport):
    """A transport of which only its existence matters."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return socket.socket() if name == "socket" else default


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_however_bytes_come_frames_are_whole_and_in_order(messages: list[bytes], pieces: list[int]) -> None:
    seen: list[bytes] = []
    connection = FrameConnection(seen.append, lambda _: None)
    with contextlib.suppress(OSError):
        connection.connection_made(Nowhere())
    wire, turn = framed(*messages), 0
    while wire:
        size = pieces[turn % len(pieces)]
        connection.data_received(wire[:size])
        wire, turn = wire[size:], turn + 1
    assert seen == messages


async def test_what_is_sent_comes_as_frames_also_just_before_the_end() -> None:
    async with ends() as both:
        both.connection.send(b"one")
        both.connection.send(b"")
        both.connection.close()
        both.connection.send(b"too late")
        assert await both.until_over() == "the connection ended"
        loop, seen = asyncio.get_running_loop(), b""
        while piece := await asyncio.wait_for(loop.sock_recv(both.raw, 100), 10):
            seen += piece
        assert seen == framed(b"one", b"")


async def test_a_frame_beyond_the_limit_ends_it_before_it_has_come() -> None:
    async with ends() as both:
        both.connection.limit = 10
        both.raw.send(framed(b"0123456789") + (11).to_bytes(4, "big"))
        assert await both.until_over() == "a frame of 11 bytes: at most 10"
        assert both.frames == [b"0123456789"]


async def test_one_that_is_closed_before_it_is_there_ends_as_it_comes() -> None:
    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    connection = FrameConnection(lambda _: None, over.set_result)
    connection.close("one too many")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await asyncio.get_running_loop().create_connection(lambda: connection, *listener.getsockname())
        assert await asyncio.wait_for(over, 10) == "one too many"


async def test_a_peer_that_goes_is_the_end() -> None:
    async with ends() as both:
        both.raw.send(framed(b"whole") + b"\0\0\0\x09half")
        both.raw.close()
        assert await both.until_over() == "the connection ended"
        assert both.frames == [b"whole"]


async def test_who_takes_nothing_pauses_the_writer_and_holds_up_the_end_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "LINGER_S", 0.2)
    async with ends() as both:
        for _ in range(1000):
            both.connection.send(bytes(64 * 1024))
            if both.connection.paused:
                break
        assert both.connection.paused
        both.connection.close()
        await both.until_over()


async def test_a_writer_that_was_paused_hears_when_it_may_go_on() -> None:
    async with ends() as both:
        heard: list[bool] = []
        both.connection.writable = lambda: heard.append(both.connection.paused)
        while not both.connection.paused:
            both.connection.send(bytes(64 * 1024))
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10):
            while not heard:
                await loop.sock_recv(both.raw, 1 << 20)
                await asyncio.sleep(0)
        assert heard == [False]
