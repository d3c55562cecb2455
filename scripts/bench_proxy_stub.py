"""OpenAI-compatible servers without a model, for `kvhive bench proxy` to put behind other routers.

    python bench_proxy_stub.py PORT...

Every completion is "ok": one word at once, or max_tokens of them with `stream`, --step seconds apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Iterable

_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"transfer-encoding:\s*chunked", re.IGNORECASE)
_MODEL = {"id": "stub", "object": "model", "owned_by": "stub", "created": 1}
_MESSAGE = {"role": "assistant", "content": "ok"}
_ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "stub",
    "choices": [{"index": 0, "message": _MESSAGE, "text": "ok", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11},
}
_DELTA = {"index": 0, "delta": {"content": "ok"}, "text": "ok"}
_PIECE = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "stub", "choices": [_DELTA]}


def _whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Stub:
    """Answers whatever it is asked."""

    def __init__(self, folder: str, step_s: float) -> None:
        """Prepare; `folder` has the tokenizer that routers are told of."""
        self._step_s = step_s
        paths = {"model_path": folder, "tokenizer_path": folder, "served_model_name": "stub"}
        about = paths | {"is_generation": True, "object": "list", "data": [_MODEL], "version": "0"}
        self._about = _whole(json.dumps(about).encode())
        self._answer = _whole(json.dumps(_ANSWER).encode())
        self._piece = _chunk(b"data: " + json.dumps(_PIECE).encode() + b"\n\n")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection's requests until it closes."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await _body(reader, head)
                if not head.startswith(b"POST /v1/"):
                    writer.write(self._about)
                elif b'"stream":true' in body or b'"stream": true' in body:
                    await self._stream(writer, int(json.loads(body).get("max_tokens", 1)))
                else:
                    writer.write(self._answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, tokens: int) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(tokens):
            writer.write(self._piece)
            if self._step_s:
                await asyncio.sleep(self._step_s)
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    length = _LENGTH.search(head)
    if length is not None:
        return await reader.readexactly(int(length[1]))
    found = b""
    if _CHUNKED.search(head):
        while size := int(await reader.readuntil(b"\r\n"), 16):
            found += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    return found


async def run(ports: Iterable[int], folder: str, step_s: float) -> None:
    """Serve until it is ended."""
    stub = Stub(folder, step_s)
    for port in ports:
        await asyncio.start_server(stub.serve, "127.0.0.1", port, limit=1 << 22)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--folder", default=".", help="a local directory with the tokenizer of the model")
    parser.add_argument("--step", type=float, default=0.0)
    options = parser.parse_args()
    asyncio.run(run(options.ports, options.folder, options.step))
