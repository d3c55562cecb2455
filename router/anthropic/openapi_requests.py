"""What this dialect accepts, as JSON Schemas. A field that is null counts as absent. See router/openapi."""

from __future__ import annotations

from kvhive.proto.limits import MAX_TENANT_CHARS
from kvhive.router.anthropic import request
from kvhive.router.anthropic.cache_control import TTLS
from kvhive.router.chat.messages import MAX_CALL_ID_CHARS, MAX_MESSAGES, MAX_TOOL_NAME_CHARS, MAX_TOOLS
from kvhive.router.frontend import ModelInfo
from kvhive.router.openapi_parts import Schema, anything, array, integer, nullable, number
from kvhive.router.sampling_params import MAX_STOP_CHARS, MAX_STOPS, MAX_TOP_K

_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_NAME: Schema = {"type": "string", "pattern": f"^[A-Za-z0-9_.:/-]{{1,{MAX_TOOL_NAME_CHARS}}}$"}
_CALL_ID: Schema = {"type": "string", "maxLength": MAX_CALL_ID_CHARS}


def messages(model: ModelInfo) -> Schema:
    """Of /v1/messages."""
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    fields = {
        **_prompt(model),
        "stream": _FLAG,
        "temperature": number(0, request.MAX_TEMPERATURE),
        "top_k": integer(0, MAX_TOP_K),
        "top_p": number(0, 1, above=True),
        "stop_sequences": array(stop, maxItems=MAX_STOPS),
        "metadata": _object({}, user_id={"type": "string", "maxLength": MAX_TENANT_CHARS}),
    }
    required = {"max_tokens": integer(0, model.max_context), "messages": _messages()}
    only_filled = {
        "properties": {"stream": {"const": True}, "max_tokens": {"const": 0}},
        "required": ["stream"],
    }
    return _object(required, **fields) | {"not": only_filled}


def count_tokens(model: ModelInfo) -> Schema:
    """Of /v1/messages/count_tokens."""
    return _object({"messages": _messages()}, **_prompt(model))


def _prompt(model: ModelInfo) -> Schema:
    """Return what both have, beside the messages."""
    layout = _object({"type": {"const": "json_schema"}, "schema": _OBJECT})
    edit = {"type": "object", "properties": {"type": {"type": "string", "pattern": "^clear_thinking_"}}}
    return {
        "model": {"enum": ["", model.name]},
        "system": {"anyOf": [_TEXT, array(_text())]},
        "tools": array(_tool(), maxItems=MAX_TOOLS),
        "tool_choice": _tool_choice(),
        "cache_control": _marker(),
        "output_config": _object({}, format=layout, effort={}),
        "thinking": {
            "type": "object",
            "properties": {"type": {"enum": list(request.THINKING)}},
            "required": ["type"],
        },
        "context_management": _object({}, edits=array(edit | {"required": ["type"]})),
        **anything(request.IGNORED),
        **{name: {"enum": [None, *values]} for name, values in request.NEUTRAL.items()},
    }


def _messages() -> Schema:
    """Return the schema of `messages`: that the last is not an assistant's, either, no schema can say."""
    said = {"user": [_text(), _tool_result()], "system": [_text()]}
    spoken = [
        _object({"role": {"const": role}, "content": _content({"anyOf": blocks}, 1)})
        for role, blocks in said.items()
    ]
    answered = {"anyOf": [_text(), _tool_use(), _thought()]}
    spoken.append(_object({"role": {"const": "assistant"}, "content": _content(answered, 0)}))
    first = {"anyOf": spoken[:-1]}
    return array({"anyOf": spoken}, prefixItems=[first], minItems=1, maxItems=MAX_MESSAGES)


def _content(block: Schema, least: int) -> Schema:
    return {"anyOf": [{"type": "string", "minLength": least}, array(block, minItems=least)]}


def _text() -> Schema:
    return _object({"type": {"const": "text"}, "text": _TEXT}, cache_control=_marker(), citations={})


def _thought() -> Schema:
    return {
        "type": "object",
        "properties": {"type": {"enum": ["thinking", "redacted_thinking"]}, "cache_control": _NULL},
        "required": ["type"],
    }


def _tool_use() -> Schema:
    return _object(
        {"type": {"const": "tool_use"}, "id": _CALL_ID, "name": _NAME, "input": _OBJECT},
        cache_control=_marker(),
        caller={},
    )


def _tool_result() -> Schema:
    return _object(
        {"type": {"const": "tool_result"}, "tool_use_id": _CALL_ID},
        is_error=_FLAG,
        content={"anyOf": [_TEXT, array(_text())]},
        cache_control=_marker(),
    )


def _marker() -> Schema:
    return _object({"type": {"const": "ephemeral"}}, ttl={"enum": list(TTLS)})


def _tool() -> Schema:
    return _object(
        {"name": _NAME, "input_schema": _OBJECT},
        type={"const": "custom"},
        description=_TEXT,
        cache_control=_marker(),
        eager_input_streaming={},
        strict={},
        defer_loading={"const": False},
        allowed_callers={"const": ["direct"]},
        input_examples={"const": []},
    )


def _tool_choice() -> Schema:
    free = _object({"type": {"enum": ["auto", "any", "none"]}}, disable_parallel_tool_use=_FLAG)
    named = _object({"type": {"const": "tool"}, "name": _NAME}, disable_parallel_tool_use=_FLAG)
    return {"anyOf": [free, named]}


def _object(required: Schema, **optional: Schema) -> Schema:
    """Return the schema of an object whose other fields may be null or absent."""
    return {
        "type": "object",
        "properties": required | {name: nullable(schema) for name, schema in optional.items()},
        "required": list(required),
        "additionalProperties": _NULL,
    }
