"""Log-probabilities in OpenAI's shape: every token, and every alternative, decoded on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvhive.router.frontend import Delta, TokenPiece

LEAST_LOGPROB = -9999.0
"""What this dialect says of a token that is all but impossible; JSON has no infinity."""


def logprob_entries(delta: Delta, piece: Callable[[int], TokenPiece]) -> list[dict[str, Any]]:
    """Return one entry per token of a delta that carries log-probabilities, none for another."""
    if not delta.logprobs:
        return []
    return [
        _entry(token_id, position.logprob, piece)
        | {"top_logprobs": [_entry(other, logprob, piece) for other, logprob in position.top]}
        for token_id, position in zip(delta.token_ids, delta.logprobs, strict=False)
    ]


def logprobs_body(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the `logprobs` of a choice."""
    return {"content": list(entries), "refusal": None}


def _entry(token_id: int, logprob: float, piece: Callable[[int], TokenPiece]) -> dict[str, Any]:
    token = piece(token_id)
    return {"token": token.text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(token.data)}
