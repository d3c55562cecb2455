"""What descriptions of a door are made of: JSON Schemas, and the operations of OpenAPI with their answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvhive.proto.limits import MAX_CACHE_NAME_CHARS, MAX_REQUEST_ID_CHARS
from kvhive.router.http_headers import CACHE_KEY_HEADER

Schema = dict[str, Any]


def record(required: Schema, **optional: Schema) -> Schema:
    """Return the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def array(items: Schema, **bounds: Any) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": items, **bounds}


def nullable(schema: Schema) -> Schema:
    """Return the schema of null, or of what another allows."""
    return {"anyOf": [schema, {"type": "null"}]} if schema else {}


def integer(low: int, high: int) -> Schema:
    """Return the schema of an integer within bounds."""
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float, above: bool = False) -> Schema:
    """Return the schema of a number within bounds, the lower one excluded or not."""
    return {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}


def anything(names: Iterable[str]) -> Schema:
    """Return fields that may be anything."""
    return {name: {} for name in sorted(names)}


def post(
    summary: str, body: Schema, answer: Schema, refusals: Mapping[str, Schema], streamed: bool = False
) -> Schema:
    """Return a path that takes a body of JSON; one that may stream has a home for its prompt, too."""
    content: Schema = {"application/json": {"schema": answer}}
    name = {"type": "string", "maxLength": MAX_REQUEST_ID_CHARS, "pattern": "^[!-~]*$"}
    parameters = [header("x-request-id", name)]
    if streamed:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no words for the events of a stream
        parameters.append(header(CACHE_KEY_HEADER, {"type": "string", "maxLength": MAX_CACHE_NAME_CHARS}))
    return {
        "post": {
            "summary": summary,
            "parameters": parameters,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": {"description": "The answer.", "content": content}, **refusals},
        }
    }


def get(summary: str, answer: Schema, refusals: Mapping[str, Schema], *parameters: Schema) -> Schema:
    """Return a path that is only read."""
    content = {"application/json": {"schema": answer}}
    return {
        "get": {
            "summary": summary,
            "parameters": list(parameters),
            "responses": {"200": {"description": "The answer.", "content": content}, **refusals},
        }
    }


def refusals(why: Mapping[int, str], error: Schema) -> dict[str, Schema]:
    """Return the answers that are errors, by status."""
    content = {"application/json": {"schema": error}}
    return {str(status): {"description": words, "content": content} for status, words in why.items()}


def header(name: str, schema: Schema) -> Schema:
    """Return a header that may be sent."""
    return {"name": name, "in": "header", "required": False, "schema": schema}


def path_name(name: str) -> Schema:
    """Return a part of the path."""
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
