"""What this dialect takes and answers, for the OpenAPI document. See router/openapi."""

from __future__ import annotations

from kvhive.router.anthropic.errors import KINDS, OVERLOADED
from kvhive.router.anthropic.openapi_requests import count_tokens, messages
from kvhive.router.frontend import ModelInfo
from kvhive.router.openapi_parts import Schema, array, nullable, post, record, refusals

_REFUSALS = {
    400: "A field is not as it must be; the message names it.",
    401: "There are API keys here, and none of them was sent.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    500: "A fault of the server's.",
    503: "No worker serves; `retry-after` and `retry-after-ms` say when to come again.",
    504: "The first token did not come in time.",
    OVERLOADED: "Too much to do; `retry-after` and `retry-after-ms` say when to come again.",
}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}

ERROR = record(
    {
        "type": {"const": "error"},
        "error": record({"type": {"enum": sorted(set(KINDS.values()))}, "message": _TEXT}),
        "request_id": nullable(_TEXT),
    }
)
MODEL = record(
    {
        "type": {"const": "model"},
        "id": _TEXT,
        "display_name": _TEXT,
        "created_at": _TEXT,
        "lifecycle": {"const": "active"},
        "max_input_tokens": _COUNT,
        "max_tokens": _COUNT,
    }
)
MODELS = record(
    {
        "data": array(MODEL),
        "has_more": {"const": False},
        "first_id": nullable(_TEXT),
        "last_id": nullable(_TEXT),
    }
)
_KEPT = record(
    {"tokens": _COUNT, "ttl_s": {"type": "number"}, "kept": {"type": "boolean"}, "not_kept": nullable(_TEXT)}
)
_REPORT = record(
    {
        "worker_id": _TEXT,
        "route_reason": _TEXT,
        "reachable_tokens": _COUNT,
        "written_tokens": _COUNT,
        "pulled_tokens": _COUNT,
        "failovers": _COUNT,
        "drafted_tokens": _COUNT,
        "accepted_tokens": _COUNT,
        "kept": array(_KEPT),
        "not_kept": nullable(_TEXT),
    }
)
_USAGE = record(
    {
        "input_tokens": _COUNT,
        "cache_creation_input_tokens": _COUNT,
        "cache_read_input_tokens": _COUNT,
        "cache_creation": record({"ephemeral_5m_input_tokens": _COUNT, "ephemeral_1h_input_tokens": _COUNT}),
        "output_tokens": _COUNT,
        "kvhive": _REPORT,
    }
)
_BLOCK = {
    "anyOf": [
        record({"type": {"const": "text"}, "text": _TEXT}),
        record({"type": {"const": "tool_use"}, "id": _TEXT, "name": _TEXT, "input": {"type": "object"}}),
    ]
}
_MESSAGE = record(
    {
        "id": _TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _TEXT,
        "content": array(_BLOCK),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": nullable(_TEXT),
        "usage": _USAGE,
    }
)


def paths(model: ModelInfo) -> Schema:
    """Return the paths that are this dialect's alone."""
    errors = refusals(_REFUSALS, ERROR)
    return {
        "/v1/messages": post("Answer a conversation.", messages(model), _MESSAGE, errors, streamed=True),
        "/v1/messages/count_tokens": post(
            "Count the tokens of a conversation.",
            count_tokens(model),
            record({"input_tokens": _COUNT}),
            errors,
        ),
    }
