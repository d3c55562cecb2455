"""A response's head travels with what follows it, and never waits for anything but that."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http_door import HEAD, say
from redis_fixtures import eventually
from scripted_frontend import ScriptedFrontend

from kvhive.router.http_protocol import MAX_BEGINNING_BYTES, HeadWithBody


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


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


async def test_a_streams_beginning_goes_with_the_first_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvhive.router.http_protocol.BEGINNING_S", 60.0)
    below = Recorded()
    transport = HeadWithBody(below)  # type: ignore[arg-type]
    transport.write(STREAM)
    transport.write(b"opening")
    for _ in range(3):
        await asyncio.sleep(0)
        assert below.writes == []
    transport.write(b" first")
    assert below.writes == [STREAM + b"opening first"]
    transport.write(b"next")
    assert below.writes[1:] == [b"next"]


async def test_a_streams_beginning_waits_for_no_slow_worker_no_end_and_no_flood() -> None:
    below = Recorded()
    transport = HeadWithBody(below)  # type: ignore[arg-type]
    transport.write(STREAM)
    await asyncio.sleep(0)
    await eventually(lambda: below.writes == [STREAM])
    transport.write(b"next")
    assert below.writes[1:] == [b"next"]
    whole = b"8\r\nall of it\r\n0\r\n\r\n"
    transport.write(STREAM)
    transport.write(whole)
    await asyncio.sleep(0)
    assert below.writes[2:] == [STREAM + whole]
    transport.write(STREAM)
    transport.write(bytes(MAX_BEGINNING_BYTES))
    assert below.writes[3:] == [STREAM + bytes(MAX_BEGINNING_BYTES)]


async def test_a_connection_that_closes_early_gets_what_was_held() -> None:
    below = Recorded()
    transport = HeadWithBody(below)  # type: ignore[arg-type]
    transport.write(STREAM)
    await asyncio.sleep(0)
    transport.close()
    assert below.writes == [STREAM] and below.closed
