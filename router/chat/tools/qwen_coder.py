"""Qwen3-Coder: tags named after the function and its parameters, whose values are plain text.

What a value means is the tool's schema's word: text where it says string, else JSON; what is no JSON is text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvhive.router.chat.tools.calls import Calls
from kvhive.router.chat.tools.feed import Feed, Reading
from kvhive.router.chat.tools.form import MAX_NAME_CHARS, ToolForm
from kvhive.router.chat.tools.hermes import CLOSE, HERMES, OPEN

FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"
MAX_VALUE_CHARS = 1024 * 1024
"""Of one parameter: whole files are written so."""


def _read(calls: Calls) -> Reading[None]:
    feed = calls.feed
    wrapped = yield from feed.optional(OPEN)
    yield from feed.space()
    yield from feed.literal(FUNCTION)
    name = yield from feed.until(">", MAX_NAME_CHARS)
    calls.begin(name)
    properties = _properties(calls.tools[name].parameters)
    begun = "{"
    yield from feed.space()
    while not (yield from feed.optional(FUNCTION_END)):
        key, value = yield from _parameter(feed, properties)
        calls.arguments(f"{begun}{json.dumps(key, ensure_ascii=False)}: {value}")
        begun = ", "
        yield from feed.space()
    calls.arguments("{}" if begun == "{" else "}")
    if wrapped:
        yield from feed.space()
        yield from feed.closing(CLOSE)
    calls.end()


def _parameter(feed: Feed, properties: Mapping[str, Any]) -> Reading[tuple[str, str]]:
    """Read one parameter; return its name and its value as JSON."""
    yield from feed.literal(PARAMETER)
    key = yield from feed.until(">", MAX_NAME_CHARS)
    said = yield from feed.until(PARAMETER_END, MAX_VALUE_CHARS)
    said = said.removeprefix("\n").removesuffix("\n")
    return key, _as_json(said, properties.get(key))


def _as_json(said: str, schema: object) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind != "string":
        try:
            json.loads(said, parse_constant=_refuse)
            return said.strip()
        except (ValueError, RecursionError):
            pass
        if said in ("None", "True", "False"):
            return {"None": "null", "True": "true", "False": "false"}[said]
    return json.dumps(said, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _properties(parameters: str) -> Mapping[str, Any]:
    schema = json.loads(parameters or "{}")  # checked when the request came
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


QWEN_CODER = ToolForm(
    name="qwen3_coder",
    read=_read,
    shape=HERMES.shape,
    enforced=HERMES,
    openers=(OPEN, FUNCTION),
    markers=(OPEN, CLOSE),
)
