"""What this dialect accepts, as JSON Schemas. See openapi."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from kvhive.proto.grammar import MAX_GRAMMAR_BYTES
from kvhive.proto.limits import (
    MAX_CACHE_NAME_CHARS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MAX_TENANT_CHARS,
)
from kvhive.router.chat.messages import (
    MAX_CALL_ID_CHARS,
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
)
from kvhive.router.frontend import ModelInfo
from kvhive.router.openai.field_policy import (
    IGNORED,
    IGNORED_IN_MESSAGES,
    IGNORED_STREAM_OPTIONS,
    NEUTRAL_IN_CHATS,
    NEUTRAL_IN_TEXTS,
)
from kvhive.router.openai.output_format import FORMATS
from kvhive.router.openai.text_request import MAX_PROMPTS
from kvhive.router.openai.tokens import NEUTRAL_WITH_MESSAGES, NEUTRAL_WITH_PROMPT
from kvhive.router.openapi_parts import Schema, anything, array, integer, nullable, number
from kvhive.router.sampling_params import MAX_SEED, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS, MAX_STOPS, MAX_TOP_K

_NOTHING: Schema = {"enum": [None, [], {}, ""]}
"""What any field of an inner object may be: it asks for nothing."""
_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_TTL: Schema = {"type": "string", "pattern": "^[1-9][0-9]{0,4}[smh]$"}


def chat_completion(model: ModelInfo) -> Schema:
    """Of /v1/chat/completions."""
    return _body(
        {
            **_shared(model),
            "messages": array(_message(), minItems=1, maxItems=MAX_MESSAGES),
            "max_completion_tokens": integer(1, model.max_context),
            "logprobs": _FLAG,
            "top_logprobs": integer(0, MAX_LOGPROBS),
            "tools": array(_tool(), maxItems=MAX_TOOLS),
            "tool_choice": _tool_choice(),
            "parallel_tool_calls": _FLAG,
        },
        ["messages"],
        NEUTRAL_IN_CHATS,
        [*_rules(), _only_with("top_logprobs", 0, "logprobs")],
    )


def text_completion(model: ModelInfo) -> Schema:
    """Of /v1/completions."""
    ids = array(integer(0, model.vocab_size - 1), minItems=1, maxItems=model.max_context - 1)
    text = {"type": "string", "minLength": 1}
    prompts = array({"anyOf": [text, ids]}, minItems=1, maxItems=MAX_PROMPTS)
    return _body(
        {
            **_shared(model),
            "prompt": {"anyOf": [text, ids, prompts]},
            "logprobs": integer(0, MAX_LOGPROBS),
            "echo": _FLAG,
        },
        ["prompt"],
        NEUTRAL_IN_TEXTS,
        _rules(),
    )


def tokenize(model: ModelInfo) -> Schema:
    """Of /tokenize."""
    salt = {"type": "string", "maxLength": MAX_CACHE_NAME_CHARS}
    either = {"model": {"enum": ["", model.name]}, "cache_salt": salt, "return_token_strs": _FLAG}
    messages = array(_message(), minItems=1, maxItems=MAX_MESSAGES)
    tools = {"tools": array(_tool(), maxItems=MAX_TOOLS), "tool_choice": _tool_choice()}
    text = {"type": "string", "minLength": 1}
    return {
        "anyOf": [
            _body({**either, "messages": messages, **tools}, ["messages"], NEUTRAL_WITH_MESSAGES),
            _body({**either, "prompt": text}, ["prompt"], NEUTRAL_WITH_PROMPT),
        ]
    }


def detokenize(model: ModelInfo) -> Schema:
    """Of /detokenize."""
    tokens = array(integer(0, model.vocab_size - 1), minItems=1)
    return _body({"model": {"enum": ["", model.name]}, "tokens": tokens}, ["tokens"], {})


def _shared(model: ModelInfo) -> Schema:
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    name = {"type": "string", "maxLength": MAX_CACHE_NAME_CHARS}
    tenant = {"type": "string", "maxLength": MAX_TENANT_CHARS}
    grammar = {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_BYTES}
    stream_options = {"include_usage": _FLAG, **anything(IGNORED_STREAM_OPTIONS)}
    bias = {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": number(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS),
        "maxProperties": MAX_LOGIT_BIAS_ENTRIES,
    }
    return {
        "model": {"enum": ["", model.name]},
        "stream": _FLAG,
        "stream_options": _inner(stream_options, nothing=_NULL),
        "max_tokens": integer(1, model.max_context),
        "temperature": number(0, MAX_TEMPERATURE),
        "top_p": number(0, 1, above=True),
        "top_k": integer(0, MAX_TOP_K),
        "min_p": number(0, 1),
        "typical_p": number(0, 1, above=True),
        "seed": integer(0, MAX_SEED),
        "stop": {"anyOf": [stop, array(stop, maxItems=MAX_STOPS)]},
        "stop_token_ids": array(integer(0, model.vocab_size - 1), maxItems=MAX_STOP_TOKEN_IDS),
        "ignore_eos": _FLAG,
        "n": integer(1, MAX_CHOICES),
        "logit_bias": bias,
        "frequency_penalty": number(-MAX_PENALTY, MAX_PENALTY),
        "presence_penalty": number(-MAX_PENALTY, MAX_PENALTY),
        "repetition_penalty": number(0, MAX_REPETITION_PENALTY, above=True),
        "min_tokens": integer(0, model.max_context),
        "priority": integer(-MAX_PRIORITY, MAX_PRIORITY),
        "user": tenant,
        "safety_identifier": tenant,
        "cache_salt": name,
        "prompt_cache_key": name,
        "prompt_cache_options": _inner(
            {"mode": {"enum": ["implicit", "explicit"]}, "ttl": _TTL, "prewarm": _FLAG}
        ),
        "prompt_cache_retention": {"enum": ["in_memory", "in-memory", "24h"]},
        "response_format": _response_format(),
        "regex": grammar,
        "grammar": grammar,
    }


def _message() -> Schema:
    marker = _inner({"mode": {"const": "explicit"}, "ttl": _TTL}, ["mode"])
    part = _inner(
        {"type": {"const": "text"}, "text": _TEXT, "prompt_cache_breakpoint": marker}, ["type", "text"]
    )
    content: Schema = {"anyOf": [_TEXT, array(part)]}
    ignored = anything(IGNORED_IN_MESSAGES)
    call_id = {"type": "string", "maxLength": MAX_CALL_ID_CHARS}
    called_name = {"type": "string", "maxLength": MAX_TOOL_NAME_CHARS}
    call = _inner(
        {
            "id": call_id,
            "type": {"const": "function"},
            "index": {},
            "function": _inner({"name": called_name, "arguments": _TEXT}, ["name", "arguments"]),
        },
        ["id", "function"],
    )
    said = {"role": {"enum": ["system", "developer", "user", "assistant"]}, "content": content, **ignored}
    called = {
        "role": {"const": "assistant"},
        "content": {"anyOf": [content, _NULL]},
        "tool_calls": array(call, minItems=1, maxItems=MAX_TOOL_CALLS),
        **ignored,
    }
    answered = {"role": {"const": "tool"}, "content": content, "tool_call_id": call_id, **ignored}
    return {
        "anyOf": [
            _inner(
                {**said, "tool_calls": {"enum": [None, []]}, "tool_call_id": {"enum": [None, ""]}},
                ["role", "content"],
            ),
            _inner({**called, "tool_call_id": {"enum": [None, ""]}}, ["role", "tool_calls"]),
            _inner({**answered, "tool_calls": {"enum": [None, []]}}, ["role", "content", "tool_call_id"]),
        ]
    }


def _tool() -> Schema:
    function = {
        "name": {"type": "string", "minLength": 1},
        "description": _TEXT,
        "parameters": _OBJECT,
        "strict": _FLAG,
    }
    return _inner(
        {"type": {"const": "function"}, "function": _inner(function, ["name"])}, ["type", "function"]
    )


def _tool_choice() -> Schema:
    function = _inner({"name": {"type": "string", "minLength": 1}}, ["name"])
    named = _inner({"type": {"const": "function"}, "function": function}, ["type", "function"])
    allowed = _inner(
        {"mode": {"enum": ["auto", "required"]}, "tools": array(named, minItems=1, maxItems=MAX_TOOLS)},
        ["mode", "tools"],
    )
    some = _inner({"type": {"const": "allowed_tools"}, "allowed_tools": allowed}, ["type", "allowed_tools"])
    return {"anyOf": [{"enum": ["auto", "none", "required"]}, named, some]}


def _response_format() -> Schema:
    schema = _inner({"name": _TEXT, "description": _TEXT, "schema": _OBJECT, "strict": _FLAG}, ["schema"])
    return {
        "anyOf": [
            _inner({"type": {"enum": ["text", "json_object"]}}, ["type"]),
            _inner({"type": {"const": "json_schema"}, "json_schema": schema}, ["type", "json_schema"]),
        ]
    }


def _body(
    fields: Schema,
    required: list[str],
    neutral: Mapping[str, tuple[object, ...]],
    rules: Sequence[Schema] = (),
) -> Schema:
    """Return the schema of a whole body, whose fields may also be null; `rules` are between fields."""
    optional = {name: nullable(schema) for name, schema in fields.items() if name not in required}
    return {
        "type": "object",
        "properties": {
            **{name: fields[name] for name in required},
            **optional,
            **{name: {"enum": [None, *values]} for name, values in neutral.items()},
            **anything(IGNORED),
        },
        "required": required,
        "additionalProperties": _NULL,
        **({"allOf": list(rules)} if rules else {}),
    }


def _inner(fields: Schema, required: list[str] | None = None, nothing: Schema = _NOTHING) -> Schema:
    """Return the schema of an object inside a body; what is not listed may only ask for nothing."""
    needed = required or []
    return {
        "type": "object",
        "properties": {name: held if name in needed else nullable(held) for name, held in fields.items()},
        "required": needed,
        "additionalProperties": nothing,
    }


def _rules() -> list[Schema]:
    """Return the rules between fields that both endpoints have."""
    alone = [
        {"not": {"required": list(pair), "properties": {name: {"not": _NULL} for name in pair}}}
        for pair in itertools.combinations(FORMATS, 2)
    ]
    return [*alone, _only_with("stream_options", {}, "stream")]


def _only_with(name: str, nothing: object, flag: str) -> Schema:
    """Return the rule that a field may only ask for something where a flag is set."""
    return {
        "anyOf": [
            {"properties": {name: {"enum": [None, nothing]}}},
            {"required": [flag], "properties": {flag: {"const": True}}},
        ]
    }
