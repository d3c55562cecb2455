"""A server that streams completions as fast as it can, or goes wrong as its model's name says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SseServer:
    """Where it listens, and what it was asked."""

    url: str = ""
    model: str = "good"
    asked: list[dict[str, Any]] = field(default_factory=list)
    delay_s: float = 0.0
    """Between two pieces."""
    busiest: int = 0
    """Most requests under way at a time."""
    _active: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0
        )
        body = await reader.readexactly(length)
        self._active += 1
        self.busiest = max(self.busiest, self._active)
        with contextlib.suppress(ConnectionError):
            if head.startswith("GET /v1/models "):
                await self._send(writer, json.dumps({"data": [{"id": self.model}]}))
            elif head.startswith("POST /v1/completions "):
                await self._complete(writer, json.loads(body))
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnone")
        self._active -= 1
        writer.close()

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.asked.append(body)
        if self.model == "busy":
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nfull")
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(body["max_tokens"]):
            self._event(writer, {"choices": [{"index": 0, "text": "x", "finish_reason": None}]})
            await writer.drain()
            await asyncio.sleep(self.delay_s)
            if self.model == "broken":
                self._event(writer, {"error": {"message": "the worker was lost"}})
            if self.model == "cut":
                return
            if self.model == "hangs":
                await asyncio.sleep(60)
        self._event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        made = body["max_tokens"] - (self.model == "short")
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": made}
        self._event(writer, {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 3}}})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def _send(self, writer: asyncio.StreamWriter, text: str) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()


@contextlib.asynccontextmanager
async def sse_server(model: str = "good") -> AsyncIterator[SseServer]:
    """Serve on a free port until the end."""
    state = SseServer(model=model)
    server = await asyncio.start_server(state.serve, "127.0.0.1", 0, limit=2**20)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield state
