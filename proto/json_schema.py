"""JSON schemas as grammars: bounded, and so put that what llguidance makes of them is what they say.

Where the library knows that it does not know a keyword, it says so. Where it would pass over something, or
take it for something else (found by comparing what it allows with a validator of schemas), the schema is put
differently here, or refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.strict_json import json_object

FIELD = "response_format"
"""What callers know a grammar as."""
MAX_SCHEMA_DEPTH = 64
"""Objects and arrays within each other, of the schema's own JSON."""
MAX_SCHEMA_VALUES = 10_000
"""Keys and values of a schema: what compiling takes grows with their square."""
MAX_NUMBER = 2**53
"""Integers beyond it are rounded."""

_DATA = ("const", "enum", "default", "examples", "example")
"""Keywords whose values are no schemas."""
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by name."""
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SPELLED_CHARS = 24
_NEXT_TO = 1e-6
"""Within one integer and the next the library takes an exclusive integer bound for an inclusive one: so it is
put as an inclusive one this much further in."""
_NEAR = 2**30
"""Up to here a float tells a number from its neighbour by _NEXT_TO."""
_PLAIN = r"^[ !#-\[\]-\U0010ffff]*$"
r"""Text without control characters, quotes and backslashes. A class of characters that has all control
characters lets the library write \" and \\ too, even where the class does not have those."""
_RISKY = re.compile(r"\[\^|\\[xucp0-9]|[\x00-\x1f]", re.IGNORECASE)
"""Patterns that may have such a class."""


def read_schema(text: str) -> dict[str, Any]:
    """Parse a schema and check its size. Raises InvalidRequest; takes milliseconds for the largest."""
    schema = json_object(FIELD, text, "a schema ")
    values = 0
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        values += len(level)
        if values > MAX_SCHEMA_VALUES:
            raise InvalidRequest(
                FIELD, f"a schema must have at most {MAX_SCHEMA_VALUES} values, has at least {values}"
            )
        level = [below for value in level for below in _inside(value)]
        if not level:
            return schema
    raise _too_deep()


def exact_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that the library reads as what the given one says. Raises InvalidRequest."""
    return {
        key: _exact_value(key, value)
        for key, value in _exact_bounds(_exact_pattern(_checked(schema))).items()
    }


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _too_deep() -> InvalidRequest:
    return InvalidRequest(FIELD, f"a schema must be at most {MAX_SCHEMA_DEPTH} deep, is deeper")


def _exact_value(key: str, value: Any) -> Any:
    if key in _DATA:
        return value
    if key in NAMED and isinstance(value, dict):
        return {name: _exact_below(below) for name, below in value.items()}
    if isinstance(value, list):
        return [_exact_below(below) for below in value]
    return _exact_below(value)


def _exact_below(value: Any) -> Any:
    return exact_schema(value) if isinstance(value, dict) else value


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse, by name, what would be passed over."""
    if "x-guidance" in schema:
        raise _unsupported("x-guidance")
    if "additionalItems" in schema and not isinstance(schema.get("items"), list):
        raise _unsupported("additionalItems", " but beside a list of items")
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(schema.get(key), bool):
            raise _unsupported(key, " as a truth value")
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > named + 1:  # an object may name one key twice
        raise _unsupported("minProperties", f" beyond what is required and one more, is {_short(least)}")
    for key in (*_NUMBERS, "const", "enum"):
        _check_numbers(key, schema.get(key))
    reference = schema.get("$ref")
    if isinstance(reference, str) and _to_data(reference):
        raise _unsupported("$ref", f" to what is no schema: {reference[:100]!r}")
    names = schema.get("patternProperties")
    for name in names if isinstance(names, dict) else ():
        if _RISKY.search(name):
            raise _unsupported("patternProperties", f" with a class of characters as in {name[:100]!r}")
    return schema


def _to_data(reference: str) -> bool:
    """Whether it points into what is no schema; a schema's name may be that of such a keyword."""
    named = True  # what stands before the first slash is no keyword
    for segment in unquote(reference.partition("#")[2]).split("/"):
        if not named and segment in _DATA:
            return True
        named = not named and segment in NAMED
    return False


def _check_numbers(key: str, value: Any) -> None:
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
            raise InvalidRequest(
                FIELD, f"a number in {key} must be at most 2**53 either way, is {_short(value)}"
            )
        todo += _inside(value)


def _short(number: float) -> str:
    """Spell a number, which may have thousands of digits."""
    spelled = str(number)
    return spelled if len(spelled) <= _SPELLED_CHARS else f"{spelled[:_SPELLED_CHARS]}..."


def _unsupported(keyword: str, how: str = "") -> InvalidRequest:
    return InvalidRequest(FIELD, f"the keyword {keyword!r} is not supported{how}")


def _exact_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or pattern == _PLAIN or not _RISKY.search(pattern):
        return schema
    others = schema.get("allOf", [])
    return {**schema, "allOf": [*(others if isinstance(others, list) else [others]), {"pattern": _PLAIN}]}


def _exact_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    schema = _inclusive(schema, "exclusiveMinimum", "minimum", _NEXT_TO, max)
    return _inclusive(schema, "exclusiveMaximum", "maximum", -_NEXT_TO, min)


def _inclusive(
    schema: dict[str, Any],
    exclusive: str,
    inclusive: str,
    inwards: float,
    tighter: Callable[[float, float], float],
) -> dict[str, Any]:
    bound = schema.get(exclusive)
    if not isinstance(bound, int | float) or bound != int(bound) or abs(bound) > _NEAR:
        return schema
    kept = {key: value for key, value in schema.items() if key != exclusive}
    other = schema.get(inclusive)
    moved = bound + inwards
    kept[inclusive] = tighter(moved, other) if isinstance(other, int | float) else moved
    return kept
