"""How commands speak to the controller: a Unix socket in the runtime directory, which is this user's alone.

One line of JSON asks, one line answers, and the connection is over. An answer with `error` is a ClusterError.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvhive.proto.errors import ClusterError, KvhiveError

ANSWER_TIMEOUT_S = 5.0
MOST_BYTES = 4 * 1024 * 1024
"""Of a line: the longest says what thousands of workers do."""
_NAME = "control"

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def socket_path(runtime_dir: Path) -> Path:
    """Return where the socket is."""
    return runtime_dir / _NAME


def ask(runtime_dir: Path, question: dict[str, Any], timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """Ask the controller. Raises ClusterError when it is not there, does not answer or says no."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(socket_path(runtime_dir)))
            connection.sendall(json.dumps(question).encode() + b"\n")
            with connection.makefile("rb") as file:
                line = file.readline(MOST_BYTES)
        answer: dict[str, Any] = json.loads(line)
    except (OSError, ValueError) as error:
        raise ClusterError(f"the controller does not answer ({error or type(error).__name__})") from error
    if "error" in answer:
        raise ClusterError(answer["error"])
    return answer


async def serve_control(runtime_dir: Path, handle: Handler) -> asyncio.Server:
    """Answer until the server is closed. KvhiveErrors of `handle` are the asker's to read."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            reply = await _reply(reader, handle)
            with contextlib.suppress(OSError):
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        finally:  # whatever went wrong: who asks must not wait for nothing
            writer.close()

    path = socket_path(runtime_dir)
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        return await asyncio.start_unix_server(answer, str(path), limit=MOST_BYTES)
    finally:
        os.umask(before)


async def _reply(reader: asyncio.StreamReader, handle: Handler) -> dict[str, Any]:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            question = json.loads(await reader.readline())
            if not isinstance(question, dict):
                raise ClusterError("control: a question is a JSON object")
            return await handle(question)
    except KvhiveError as error:
        return {"error": str(error)}
    except (ValueError, TimeoutError, OSError) as error:
        return {"error": f"control: not a question ({error or type(error).__name__})"}
