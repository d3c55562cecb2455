"""Schemas in a body, as the text that is handed on: of a tool's parameters, or of the answer."""

from __future__ import annotations

import json
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.json_schema import MAX_SCHEMA_DEPTH
from kvhive.router.field_checks import check_text

MAX_SCHEMA_CHARS = 256 * 1024
"""Of one schema: some thousand properties."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def schema_text(where: str, schema: dict[str, Any]) -> str:
    """Return a JSON Schema as text, its keys in the caller's order. Raises InvalidRequest."""
    _check_depth(where, schema)
    try:
        text = _ENCODER.encode(schema)
    except ValueError as error:  # a number beyond all floats
        raise InvalidRequest(where, f"must be JSON: {error}") from error
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidRequest(where, f"must be at most {MAX_SCHEMA_CHARS} characters, is {len(text)}")
    check_text(where, text)
    return text


def _check_depth(where: str, schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        below = [item for held in level for item in (held.values() if isinstance(held, dict) else held)]
        level = [item for item in below if isinstance(item, dict | list)]
        if not level:
            return
    raise InvalidRequest(where, f"must be at most {MAX_SCHEMA_DEPTH} objects and arrays deep, is deeper")
