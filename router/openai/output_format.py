"""What the whole answer must be: OpenAI's response_format, and `regex` and `grammar`, which are ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.grammar import MAX_GRAMMAR_BYTES
from kvhive.router.field_checks import check_chars, spell_text
from kvhive.router.http_body import json_type
from kvhive.router.json_fields import typed
from kvhive.router.openai.field_policy import refuse_others
from kvhive.router.sampling_params import Grammar
from kvhive.router.schema_text import schema_text

FORMATS = ("response_format", "regex", "grammar")
"""At most one of them may be given."""
_SCHEMA = "response_format.json_schema"


def read_grammar(given: Mapping[str, Any]) -> Grammar | None:
    """Return what binds the output, None where nothing does. Raises InvalidRequest."""
    asked = [name for name in FORMATS if name in given]
    if len(asked) > 1:
        raise InvalidRequest(asked[1], f"must not be given with {asked[0]}")
    if asked == ["response_format"]:
        return _response_format(typed(given, "response_format", dict, {}))
    for name in asked:
        text: str = typed(given, name, str, "")
        check_chars(name, text, MAX_GRAMMAR_BYTES)
        if not text:
            raise InvalidRequest(name, "must not be empty")
        return Grammar("regex" if name == "regex" else "lark", text)
    return None


def grammar_field(grammar: Grammar | None) -> str:
    """Return the field of the body that a grammar came from."""
    match grammar:
        case Grammar("json_schema"):
            return f"{_SCHEMA}.schema"
        case Grammar("regex"):
            return "regex"
        case Grammar("lark"):
            return "grammar"
    return "response_format"


def _response_format(asked: dict[str, Any]) -> Grammar | None:
    kind = asked.get("type")
    if kind == "json_schema":
        refuse_others("response_format", asked, frozenset({"type", "json_schema"}))
        return _json_schema(asked.get("json_schema"))
    refuse_others("response_format", asked, frozenset({"type"}))
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    shown = spell_text(kind) if isinstance(kind, str) else json_type(kind)
    raise InvalidRequest("response_format.type", f"must be text, json_object or json_schema, is {shown}")


def _json_schema(asked: object) -> Grammar:
    if not isinstance(asked, dict):
        raise InvalidRequest(_SCHEMA, f"must be an object, is {json_type(asked)}")
    refuse_others(_SCHEMA, asked, frozenset({"name", "description", "schema", "strict"}))
    for name, kind in (("name", str), ("description", str), ("strict", bool)):
        value = asked.get(name)
        if value is not None:
            typed({f"{_SCHEMA}.{name}": value}, f"{_SCHEMA}.{name}", kind, None)
    schema = asked.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{_SCHEMA}.schema", f"must be an object, is {json_type(schema)}")
    return Grammar("json_schema", schema_text(f"{_SCHEMA}.schema", schema))
