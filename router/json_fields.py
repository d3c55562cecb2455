"""Fields of a JSON object, read strictly: "5" is not a number, and true is no 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.http_body import json_type

_WANTED = {bool: "a boolean", int: "an integer", str: "a string", list: "an array", dict: "an object"}


def typed(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a field of exactly this JSON type, or the default. Raises InvalidRequest."""
    if name not in given:
        return default
    value = given[name]
    if type(value) is not kind:
        raise InvalidRequest(name, f"must be {_WANTED[kind]}, is {json_type(value)}")
    return value


def number(given: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number, or the default. Raises InvalidRequest."""
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, f"must be a number, is {json_type(value)}")
    return value
