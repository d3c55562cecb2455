"""One streamed completion from any OpenAI-compatible server, with the time of every piece.

A connection of its own for every request, closed after it: some servers close theirs anyway, and so all are
asked alike. The client must cost little beside what it measures, hence no HTTP library above the parser.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

from kvhive.scripts.bench_workloads import Ask

READ_BYTES = 64 * 1024
MAX_EVENT_BYTES = 4 * 1024 * 1024
"""Longest body or event that is kept: more is no answer to what was asked."""
SHOWN_CHARACTERS = 300
"""How much of a server's complaint is reported."""


class ExchangeFailed(Exception):
    """The server's answer is not what was asked for; the message says how."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Of the whole response, where it is another one than 200."""


@dataclass(slots=True)
class Timing:
    """One request as its client saw it. Times are in seconds since it was sent, connecting included."""

    news_s: list[float] = field(default_factory=list)
    """When each piece of output came."""
    total_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """None where the server does not say."""
    error: str = ""
    """Empty when all went well."""


class BenchClient:
    """Asks one server for completions of one model."""

    def __init__(self, base_url: str, model: str, timeout_s: float, clock: Callable[[], float]) -> None:
        """Prepare; `base_url` is without `/v1`. `timeout_s` bounds each request as a whole."""
        self._url = base_url
        self._model = model
        self._timeout_s = timeout_s
        self._clock = clock

    async def complete(self, ask: Ask) -> Timing:
        """Send one request and return how it went. Failures are in the result, not raised."""
        timing = Timing(prompt_tokens=len(ask.prompt))
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                async for event in stream_events(f"{self._url}/v1/completions", body):
                    _take(timing, event, self._clock() - began)
            _check(timing, ask)
        except TimeoutError:
            timing.error = f"no end within {self._timeout_s:g} s"
        except (OSError, ValueError, ExchangeFailed, h11.RemoteProtocolError) as error:
            timing.error = f"{type(error).__name__}: {error}"[:SHOWN_CHARACTERS]
        except (LookupError, TypeError, AttributeError) as error:
            timing.error = f"an answer of another shape: {error!r}"[:SHOWN_CHARACTERS]
        timing.total_s = self._clock() - began
        return timing


async def get_json(url: str, timeout_s: float) -> Any:
    """Return a GET's JSON body. Raises OSError (a time-out too), ValueError, ExchangeFailed."""
    async with asyncio.timeout(timeout_s):
        return await _whole(url, "GET", b"")


async def whole_json(url: str, body: dict[str, Any]) -> Any:
    """Return the JSON body that a POST is answered with. Raises as `get_json`; the time is the caller's."""
    return await _whole(url, "POST", json.dumps(body).encode())


async def _whole(url: str, method: str, sent: bytes) -> Any:
    body = bytearray()
    async for chunk in _body(url, method, sent):
        body += chunk
        if len(body) > MAX_EVENT_BYTES:
            raise ExchangeFailed(f"more than {MAX_EVENT_BYTES} bytes")
    return json.loads(bytes(body))


def _take(timing: Timing, event: dict[str, Any], now_s: float) -> None:
    if "error" in event:
        raise ExchangeFailed(json.dumps(event["error"]))
    choices = event.get("choices") or []
    # A piece may be empty of text (half a character) and still be news; one that only ends a choice is not.
    if any(choice.get("text") or choice.get("finish_reason") is None for choice in choices):
        timing.news_s.append(now_s)
    usage = event.get("usage")
    if usage:
        timing.prompt_tokens = usage["prompt_tokens"]
        timing.completion_tokens = usage["completion_tokens"]
        timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _check(timing: Timing, ask: Ask) -> None:
    """Raise ExchangeFailed unless the server did exactly the work that was asked for."""
    for what, wanted, got in (
        ("prompt", len(ask.prompt), timing.prompt_tokens),
        ("output", ask.max_tokens, timing.completion_tokens),
    ):
        if got != wanted:
            raise ExchangeFailed(f"{got} tokens of {what}, asked for {wanted}")
    if not timing.news_s:
        raise ExchangeFailed("no output was streamed")


async def stream_events(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield a stream's events up to [DONE]. Raises ExchangeFailed when it ends without."""
    held = b""
    async for chunk in _body(url, "POST", json.dumps(body).encode()):
        *lines, held = (held + chunk).split(b"\n")
        if len(held) > MAX_EVENT_BYTES:
            raise ExchangeFailed(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            name, _, data = line.rstrip(b"\r").partition(b":")
            if name == b"data" and data.strip() == b"[DONE]":
                return
            if name == b"data":
                event = json.loads(data)
                if not isinstance(event, dict):
                    raise ExchangeFailed("an event that is no JSON object")
                yield event
    raise ExchangeFailed("the stream ended without [DONE]")


async def _body(url: str, method: str, body: bytes) -> AsyncIterator[bytes]:
    """Yield a response's body as it comes. Raises ExchangeFailed for a status other than 200."""
    where = urlsplit(url)
    secure = ssl.create_default_context() if where.scheme == "https" else None
    port = where.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(where.hostname, port, ssl=secure, limit=READ_BYTES)
    try:
        connection = h11.Connection(h11.CLIENT)
        headers = [("host", where.netloc), ("accept", "*/*"), ("connection", "close")]
        if method == "POST":
            headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
        request = h11.Request(method=method, target=where.path, headers=headers)
        writer.write(connection.send(request) or b"")
        if body:
            writer.write(connection.send(h11.Data(data=body)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        async for chunk in _received(connection, reader):
            yield chunk
    finally:
        writer.close()


async def _received(connection: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    status, complaint = 200, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data) and status == 200:
            yield bytes(event.data)
        elif isinstance(event, h11.Data):
            complaint = (complaint + bytes(event.data))[:SHOWN_CHARACTERS]
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            if status != 200:
                raise ExchangeFailed(f"status {status}: {complaint.decode(errors='replace')}", status)
            return
