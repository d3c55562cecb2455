"""What the Anthropic dialect answers with: messages, as plain JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvhive.router.anthropic.blocks import Piece, whole_blocks
from kvhive.router.anthropic.usage import expected_usage, usage_body
from kvhive.router.frontend import Finished, ModelInfo, Usage


@dataclass(frozen=True, slots=True)
class MessageShape:
    """What all pieces of one answer share."""

    request_id: str
    model: str

    def begun(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the message as a stream begins with it."""
        return self._message([], None, None, expected_usage(prompt_tokens))

    def whole(self, pieces: Sequence[Piece], finished: Finished, usage: Usage) -> dict[str, Any]:
        """Return the whole message."""
        return self._message(whole_blocks(pieces), *stop_of(finished), usage_body(usage))

    def prewarmed(self, usage: Usage) -> dict[str, Any]:
        """Return the message of a prompt that was only to be cached."""
        return self._message([], "max_tokens", None, usage_body(usage) | {"output_tokens": 0})

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def stop_of(finished: Finished) -> tuple[str, str | None]:
    """Return an answer's stop_reason and stop_sequence."""
    match finished.reason:
        case "length":
            return "max_tokens", None
        case "tool_calls":
            return "tool_use", None
    return ("stop_sequence", finished.stop) if finished.stop else ("end_turn", None)


def model_body(model: ModelInfo) -> dict[str, Any]:
    """Return one entry of /v1/models as Anthropic's clients read it."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.max_context,
        "max_tokens": model.max_context,
    }


def models_page(models: Sequence[ModelInfo]) -> dict[str, Any]:
    """Return all models as the one page there is."""
    data = [model_body(model) for model in models]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"data": data, "has_more": False, "first_id": None, "last_id": None} | ends
