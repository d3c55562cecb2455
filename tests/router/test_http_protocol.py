"""A response's head travels with what follows it, and never waits for anything but that."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http_door import HEAD, say
from scripted_frontend import ScriptedFrontend

from kvhive.router.http_protocol import HeadWithBody


class Recorded:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def test_a_head_goes_with_the_next_write() -> None:
    below = Recorded()
    transport: Any = HeadWithBody(below)  # type: ignore[arg-type]
    transport.write(b"HTTP/1.1 200 OK\r\na: b\r\n\r\n")
    assert below.writes == []
    transport.write(b"body")
    transport.write(b"more")
    assert below.writes == [b"HTTP/1.1 200 OK\r\na: b\r\n\r\nbody", b"more"]
    assert not transport.is_closing()


async def test_a_head_alone_goes_at_the_end_of_the_turn_or_with_the_connection() -> None:
    head = b"HTTP/1.1 204 No Content\r\n\r\n"
    below = Recorded()
    transport = HeadWithBody(below)  # type: ignore[arg-type]
    transport.write(head)
    transport.write(head)
    await asyncio.sleep(0)
    assert below.writes == [head + head]
    transport.write(head)
    transport.close()
    assert below.writes == [head + head, head] and below.closed


async def test_an_answer_without_a_body_does_not_wait_for_one(frontend: ScriptedFrontend, port: int) -> None:
    """HEAD, as load balancers ask, and then another request on the same connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for method, path in (("HEAD", "healthz"), ("HEAD", "nowhere"), ("GET", "healthz")):
        writer.write(f"{method} /{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert head.startswith(b"HTTP/1.1 200 " if path == "healthz" else b"HTTP/1.1 404 ")
    writer.close()


async def test_what_asks_a_client_to_go_on_goes_at_once() -> None:
    below = Recorded()
    HeadWithBody(below).write(b"HTTP/1.1 100 Continue\r\n\r\n")  # type: ignore[arg-type]
    assert below.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", say("hang", stream=True)),
        ("/v1/completions", {"prompt": "hang", "stream": True}),
    ],
)
async def test_the_head_of_a_stream_does_not_wait_for_its_first_token(
    frontend: ScriptedFrontend, port: int, path: str, body: dict[str, Any]
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    writer.write((HEAD % len(content)).replace(b"/v1/chat/completions", path.encode()) + content)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    assert head.startswith(b"HTTP/1.1 200 ") and b"x-kvhive-worker: w1" in head
    writer.close()
    await frontend.until_idle()
