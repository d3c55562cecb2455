"""What the OpenAI dialect answers with: chat completions, usage, models and errors, as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from starlette.responses import JSONResponse

from kvhive.proto.errors import InvalidRequest, KvhiveError, Overloaded, TimedOut, Unavailable
from kvhive.router.frontend import FinishReason, KeptPrefix, ModelInfo, ToolCallDelta, Usage
from kvhive.router.http_body import BodyTimeout, BodyTooLarge
from kvhive.router.http_headers import headers_after
from kvhive.router.openai.logprobs import logprobs_body


@dataclass(slots=True)
class WholeChoice:
    """One choice of an answer that is sent as a whole."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None
    """None where they were not asked for."""
    reason: FinishReason | None = None
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Tool calls by their index, in OpenAI's shape; each grows as its pieces come."""

    def add_calls(self, pieces: Sequence[ToolCallDelta]) -> None:
        """Take in pieces of tool calls."""
        for piece in pieces:
            call = self.calls.setdefault(
                piece.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] += piece.id
            call["function"]["name"] += piece.name
            call["function"]["arguments"] += piece.arguments


class AnswerShape(Protocol):
    """One answer in one dialect. `logprobs` are the entries of `openai_logprobs.logprob_entries`."""

    every_token: ClassVar[bool]
    """Whether a stream has a piece for tokens without text, too: half a character, a special token."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the piece of a stream that comes before a choice's first news, if there is one."""
        ...

    def news(self, index: int, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return one piece of a stream: more of one choice. Called in the order of its tokens."""
        ...

    def calls(
        self, index: int, pieces: Sequence[ToolCallDelta], text: str, logprobs: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return one piece of a stream that has more of one choice's tool calls."""
        ...

    def end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """Return the piece that ends a choice."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the last piece of a stream that asked for its usage."""
        ...

    def completion(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        """Return a whole answer."""
        ...


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What all pieces of one chat completion share. See AnswerShape."""

    every_token: ClassVar[bool] = False
    request_id: str
    model: str
    created: int
    """Unix time in seconds."""

    def completion(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        """See AnswerShape."""
        bodies = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": None if choice.logprobs is None else logprobs_body(choice.logprobs),
                "finish_reason": choice.reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._envelope("chat.completion") | {"choices": bodies, "usage": usage_body(usage)}

    def opening(self, index: int) -> dict[str, Any]:
        """See AnswerShape."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def news(self, index: int, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """See AnswerShape."""
        return self._chunk(index, {"content": text}, logprobs=logprobs)

    def calls(
        self, index: int, pieces: Sequence[ToolCallDelta], text: str, logprobs: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """See AnswerShape."""
        delta: dict[str, Any] = {"content": text} if text else {}
        return self._chunk(
            index, delta | {"tool_calls": [_piece(piece) for piece in pieces]}, logprobs=logprobs
        )

    def end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """See AnswerShape."""
        return self._chunk(index, {}, reason)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """See AnswerShape."""
        return self._envelope("chat.completion.chunk") | {"choices": [], "usage": usage_body(usage)}

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        reason: FinishReason | None = None,
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        body = logprobs_body(logprobs) if logprobs else None
        choice = {"index": index, "delta": dict(delta), "logprobs": body, "finish_reason": reason}
        return self._envelope("chat.completion.chunk") | {"choices": [choice]}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def _message(choice: WholeChoice) -> dict[str, Any]:
    text = "".join(choice.pieces)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if choice.calls:
        message["content"] = text or None
        message["tool_calls"] = [choice.calls[index] for index in sorted(choice.calls)]
    return message


def _piece(piece: ToolCallDelta) -> dict[str, Any]:
    """Return a piece of a call; only its first one says what it calls."""
    function = {"name": piece.name} if piece.name else {}
    named = {"id": piece.id, "type": "function"} if piece.id else {}
    return {"index": piece.index, **named, "function": function | {"arguments": piece.arguments}}


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return usage in OpenAI's shape, with the cache's own report under `kvhive`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.read_tokens,
            "cache_write_tokens": usage.written_tokens,
        },
        "kvhive": {
            "worker_id": usage.worker_id,
            "route_reason": usage.route_reason,
            "reachable_tokens": usage.reachable_tokens,
            "written_tokens": usage.written_tokens,
            "pulled_tokens": usage.pulled_tokens,
            "kept": [_kept(prefix) for prefix in usage.kept],
            "not_kept": usage.not_kept or None,
            "failovers": usage.failovers,
            "drafted_tokens": usage.drafted_tokens,
            "accepted_tokens": usage.accepted_tokens,
        },
    }


def _kept(prefix: KeptPrefix) -> dict[str, Any]:
    """Return what became of one breakpoint."""
    return {
        "tokens": prefix.tokens,
        "ttl_s": prefix.ttl_s,
        "kept": prefix.kept,
        "not_kept": prefix.not_kept or None,
    }


def model_body(model: ModelInfo) -> dict[str, Any]:
    """Return one entry of /v1/models; `max_model_len` is the limit that is enforced."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "kvhive",
        "max_model_len": model.max_context,
        "vocab_size": model.vocab_size,
        "identity": model.identity,
    }


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe_error(error: KvhiveError) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body for an error of ours."""
    text = str(error)
    match error:
        case InvalidRequest():
            return 400, error_body(text, "invalid_request_error", error.field)
        case BodyTooLarge():
            return 413, error_body(text, "invalid_request_error", code="request_too_large")
        case BodyTimeout():
            return 408, error_body(text, "invalid_request_error", code="request_timeout")
        case Overloaded():
            return 429, error_body(text, "rate_limit_error", code="overloaded")
        case Unavailable():
            return 503, error_body(text, "service_unavailable", code="unavailable")
        case TimedOut():
            return 504, error_body(text, "timeout", code="timeout")
    return 500, error_body("internal error", "server_error")


def error_response(error: KvhiveError, request_id: str = "") -> JSONResponse:
    """Return an error as a whole response; one that may be retried says when."""
    status, body = describe_error(error)
    headers = {"x-request-id": request_id} if request_id else {}
    return JSONResponse(body, status, headers | headers_after(error))


def model_not_found(name: str) -> JSONResponse:
    """Return the 404 for a model that is not served."""
    message = f"model: {name[:128]!a} is not served here"
    return JSONResponse(error_body(message, "invalid_request_error", "model", "model_not_found"), 404)
