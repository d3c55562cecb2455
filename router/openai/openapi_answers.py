"""What this dialect answers with, as JSON Schemas. See openapi."""

from __future__ import annotations

from kvhive.router.openapi_parts import Schema, array, nullable, record

_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
_REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}


ERROR = record(
    {"error": record({"message": _TEXT, "type": _TEXT, "param": nullable(_TEXT), "code": nullable(_TEXT)})}
)
MODEL = record(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "max_model_len": _COUNT,
        "vocab_size": _COUNT,
        "identity": _TEXT,
    }
)
MODELS = record({"object": {"const": "list"}, "data": array(MODEL)})
DETOKENIZED = record({"prompt": _TEXT})
_USAGE = record(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": record({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
        "kvhive": record(
            {
                "worker_id": _TEXT,
                "route_reason": _TEXT,
                "reachable_tokens": _COUNT,
                "written_tokens": _COUNT,
                "pulled_tokens": _COUNT,
                "kept": array(
                    record(
                        {
                            "tokens": _COUNT,
                            "ttl_s": {"type": "number"},
                            "kept": {"type": "boolean"},
                            "not_kept": nullable(_TEXT),
                        }
                    )
                ),
                "not_kept": nullable(_TEXT),
                "failovers": _COUNT,
                "drafted_tokens": _COUNT,
                "accepted_tokens": _COUNT,
            }
        ),
    }
)
_BYTES = array({"type": "integer", "minimum": 0, "maximum": 255})
_LIKELY = {"token": _TEXT, "logprob": {"type": "number"}, "bytes": _BYTES}
_CALL = record(
    {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": record({"name": _TEXT, "arguments": _TEXT}),
    }
)


def tokenized() -> Schema:
    """Of /tokenize."""
    return record(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": array(_COUNT),
            "token_strs": nullable(array(_TEXT)),
        }
    )


def chat_completion() -> Schema:
    """Of /v1/chat/completions, where it is not streamed."""
    entries = array(record({**_LIKELY, "top_logprobs": array(record(_LIKELY))}))
    message = record(
        {"role": {"const": "assistant"}, "content": nullable(_TEXT), "refusal": {"type": "null"}},
        tool_calls=array(_CALL, minItems=1),
    )
    return _completion(
        "chat.completion",
        {"message": message, "logprobs": nullable(record({"content": entries, "refusal": {"type": "null"}}))},
    )


def text_completion() -> Schema:
    """Of /v1/completions, where it is not streamed."""
    likely = {"type": "object", "additionalProperties": {"type": "number"}}
    lists = record(
        {
            "tokens": array(_TEXT),
            "token_logprobs": array(nullable({"type": "number"})),
            "top_logprobs": array(nullable(likely)),
            "text_offset": array(_COUNT),
        }
    )
    return _completion("text_completion", {"text": _TEXT, "logprobs": nullable(lists)})


def _completion(kind: str, choice: Schema) -> Schema:
    return record(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "choices": array(record({"index": _COUNT, **choice, "finish_reason": _REASON}), minItems=1),
            "usage": _USAGE,
        }
    )
