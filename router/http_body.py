"""Reading a request's JSON body with every bound in place: bytes, time, nesting, encoding."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from kvhive.proto.errors import InvalidRequest, KvhiveError

T = TypeVar("T")

BODY_TIMEOUT_S = 60.0
"""Longest a client may take to send its body: a slow one must not hold memory for ever."""
OFF_LOOP_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread, so that other streams go on where the parser lets them."""
MAX_JSON_PARTS = 100_000
"""Commas and opening brackets in a body, which is what parsing costs and holds everybody up for: a long
conversation has thousands."""


class BodyTooLarge(KvhiveError):
    """The body exceeds the limit; it was not read to its end."""


class BodyTimeout(KvhiveError):
    """The body did not arrive in time."""


class Bodies:
    """Reads the bodies of all requests of one application."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # One thread, so one large body at a time: each holds the event loop up for milliseconds, and for all
        # of theirs together if they took turns with it. A thread of their own: no other work waits for them.
        self._large = ThreadPoolExecutor(1, "bodies")

    async def read(self, request: Request, parse: Callable[[dict[str, Any]], T]) -> T:
        """Return what a dialect makes of the JSON object in a body.

        Raises BodyTooLarge, BodyTimeout, InvalidRequest.
        """
        return await self.parsed(await _read(request, self._max_bytes), parse)

    async def parsed(self, body: bytes | bytearray, parse: Callable[[dict[str, Any]], T]) -> T:
        """Return what a dialect makes of the JSON object in these bytes. Raises InvalidRequest."""
        if len(body) <= OFF_LOOP_BYTES:
            return parse(parse_object(body))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._large, lambda: parse(parse_object(body)))


async def _read(request: Request, max_bytes: int) -> bytearray:
    """Return the whole body. Raises BodyTooLarge before reading more than `max_bytes`, BodyTimeout.

    A false or absent Content-Length gains nothing: what arrives is counted as well. It is not copied into
    `bytes`: where memory is new to the machine, 5 MB more held the event loop up for a tenth of a second.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise BodyTooLarge(f"the body must be at most {max_bytes} bytes, is {declared[:20]}")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise BodyTooLarge(f"the body must be at most {max_bytes} bytes")
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    return body


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in a body. Raises InvalidRequest("body") for anything else."""
    parts = sum(body.count(mark) for mark in (b",", b"[", b"{")) if len(body) > MAX_JSON_PARTS else 0
    if parts > MAX_JSON_PARTS:
        raise InvalidRequest("body", f"must have at most {MAX_JSON_PARTS} commas and brackets, has {parts}")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest("body", f"must be UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest("body", f"must be JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise InvalidRequest("body", "is nested too deeply") from error
    except ValueError as error:  # an integer of too many digits
        raise InvalidRequest("body", f"must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("body", f"must be a JSON object, is {json_type(value)}")
    return value


def json_type(value: object) -> str:
    """Name a value's type in JSON's words, for messages."""
    names = {type(None): "null", bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    return names.get(type(value), "an array" if isinstance(value, list) else "an object")


def _refuse_constant(name: str) -> None:
    raise InvalidRequest("body", f"must be JSON, which has no {name}")
