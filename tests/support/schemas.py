"""JSON schemas of every kind that grammars know, each finite enough for random weights to come to an end."""

from __future__ import annotations

import itertools
from typing import Any

Schema = dict[str, Any]

_TEXT = {"type": "string", "maxLength": 6}
_LEAVES: dict[str, Schema] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "short text": _TEXT,
    "exact text": {"type": "string", "minLength": 3, "maxLength": 3},
    "integer": {"type": "integer", "minimum": -20, "maximum": 300},
    "above": {"type": "integer", "exclusiveMinimum": 7, "exclusiveMaximum": 12},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "open number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "enum": {"enum": ["red", "grün", "青", 3, 2.5, True, None, ["a"], {"b": 1}]},
    "constant": {"const": {"a": [1, "zwei", None], "ü": '\u2028"\\'}},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    "unicode pattern": {"type": "string", "pattern": "^[äöü日本]{1,4}$"},
    "pattern and length": {"type": "string", "pattern": "^a+b*$", "minLength": 2, "maxLength": 5},
    "escapes": {"enum": ["\n", '\t"', "\\u", "\x01", "a/b", "😀", "\ud7ff"]},
    "nullable": {"type": ["string", "null"], "maxLength": 4},
    "many types": {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 9},
}
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration", "uri")


def _tuple(*items: Schema) -> Schema:
    return {"type": "array", "prefixItems": list(items), "items": False, "minItems": len(items)}


def _object(required: int, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:required],
        "additionalProperties": False,
    }


def _nested(depth: int) -> Schema:
    schema: Schema = {"type": "boolean"}
    for level in range(depth):
        schema = _object(1, **{f"level{level}": schema})
    return schema


_LIST = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
}
_TREE = {
    "type": "object",
    "properties": {
        "leaf": {"type": "boolean"},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["leaf"],
    "additionalProperties": False,
}
_MUTUAL = {
    "$ref": "#/$defs/even",
    "$defs": {
        "even": _object(1, x={"type": "null"}, odd={"$ref": "#/$defs/odd"}),
        "odd": _object(1, y={"const": 1}, even={"$ref": "#/$defs/even"}),
    },
}
_HAND_MADE: dict[str, Schema] = {
    "list": _LIST,
    "tree": _TREE,
    "mutual": _MUTUAL,
    "old definitions": {
        "definitions": {"a": _TEXT},
        "type": "array",
        "items": {"$ref": "#/definitions/a"},
        "minItems": 1,
        "maxItems": 3,
    },
    "reference with neighbours": {
        "$ref": "#/$defs/a",
        "minLength": 2,
        "$defs": {"a": {"type": "string", "maxLength": 4}},
    },
    "anchor": {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "enum": [1, 2]}}},
    "pointer": {
        "properties": {
            "a/b": {"type": "integer", "maximum": 5, "minimum": 0},
            "c": {"$ref": "#/properties/a~1b"},
        },
        "type": "object",
        "required": ["a/b", "c"],
        "additionalProperties": False,
    },
    "all of": {"allOf": [_object(1, a=_TEXT, b=_TEXT), {"required": ["b"]}]},
    "all of bounds": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}, {"multipleOf": 2}]},
    "all of texts": {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]},
    "any of objects": {"anyOf": [_object(1, a={"const": 1}), _object(1, b={"const": 2})]},
    "any of beside": {
        "type": "object",
        "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        "additionalProperties": False,
    },
    "one of types": {
        "oneOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"type": "boolean"}, {"type": "null"}]
    },
    "one of tags": {
        "oneOf": [
            _object(2, kind={"const": "a"}, x={"type": "boolean"}),
            _object(2, kind={"const": "b"}, y=_TEXT),
        ]
    },
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "some": {
        "type": "object",
        "additionalProperties": {"type": "null"},
        "minProperties": 1,
        "maxProperties": 3,
    },
    "patterned keys": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "required unnamed": {
        "type": "object",
        "required": ["z"],
        "additionalProperties": {"enum": [0, 1]},
        "maxProperties": 2,
    },
    "unicode keys": _object(
        3, **{"ключ": {"type": "boolean"}, "鍵": {"type": "null"}, 'a b"c\\': {"const": "✓"}}
    ),
    "empty object": {"type": "object", "additionalProperties": False},
    "empty array": {"type": "array", "maxItems": 0},
    "matrix": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
        },
    },
    "tuple and rest": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}],
        "items": {"type": "null"},
        "minItems": 1,
        "maxItems": 3,
    },
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/x",
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [1],
        "$comment": "c",
        "deprecated": True,
        "type": "boolean",
    },
    "tool call": _object(
        2,
        name={"enum": ["search", "open"]},
        arguments=_object(1, query=_TEXT, limit={"type": "integer", "minimum": 1, "maximum": 50}),
    ),
    "large numbers": {"type": "integer", "minimum": 999_999_990, "maximum": 1_000_000_010},
    "small numbers": {"type": "number", "minimum": 0.001, "maximum": 0.0025},
    "negative": {"type": "number", "minimum": -100.5, "maximum": -99.25},
    "decimals": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 3},
    "false property": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "never": False},
        "required": ["a"],
        "additionalProperties": False,
    },
    "enum of type": {"type": "string", "enum": ["a", 1, None, "b"]},
}


def all_schemas() -> dict[str, Schema]:
    """Return 200 schemas by name."""
    found: dict[str, Schema] = {f"leaf: {name}": schema for name, schema in _LEAVES.items()}
    found |= {f"format: {name}": {"type": "string", "format": name} for name in FORMATS}
    for name, schema in _LEAVES.items():
        found[f"in an object: {name}"] = _object(1, value=schema, other={"type": "boolean"})
        found[f"in an array: {name}"] = {"type": "array", "items": schema, "minItems": 1, "maxItems": 3}
        found[f"or nothing: {name}"] = {"anyOf": [schema, {"type": "null"}]}
        found[f"by reference: {name}"] = _object(2, a={"$ref": "#/$defs/it"}, b={"$ref": "#/$defs/it"}) | {
            "$defs": {"it": schema}
        }
    found |= {f"nested {depth}": _nested(depth) for depth in (2, 3, 5, 8, 12, 20)}
    found |= _HAND_MADE
    pairs = itertools.combinations(_LEAVES.items(), 2)
    for (one, first), (other, second) in itertools.islice(pairs, 0, None, 2):
        if len(found) == 200:
            break
        found[f"{one} and {other}"] = _tuple(first, second)
    return found
