"""What POST /v1/completions answers with: text without roles, and log-probabilities as parallel lists."""

from __future__ import annotations

import codecs
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvhive.router.frontend import FinishReason, ToolCallDelta, Usage
from kvhive.router.openai.response import WholeChoice, usage_body


class TextOffsets:
    """Counts the characters of one choice's text as its tokens come, parts of characters included."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def push(self, data: bytes) -> int:
        """Take in the next token's bytes; return how many whole characters stand before it."""
        before = self._characters
        self._characters += len(self._decoder.decode(data))
        return before


@dataclass(frozen=True, slots=True)
class TextShape:
    """What all pieces of one text completion share. See AnswerShape."""

    every_token: ClassVar[bool] = True
    """Who asks for plain completions may be measuring: when a token came is news."""
    request_id: str
    model: str
    created: int
    """Unix time in seconds."""
    _offsets: defaultdict[int, TextOffsets] = field(default_factory=lambda: defaultdict(TextOffsets))
    """Of each choice of a stream."""

    def opening(self, index: int) -> None:
        """See AnswerShape."""

    def news(self, index: int, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """See AnswerShape."""
        body = parallel_logprobs(logprobs, self._offsets[index]) if logprobs else None
        return self._envelope() | {"choices": [_choice(index, text, body, None)]}

    def calls(
        self, index: int, pieces: Sequence[ToolCallDelta], text: str, logprobs: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """See AnswerShape. There are no tools here."""
        return self.news(index, text, logprobs)

    def end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """See AnswerShape."""
        return self._envelope() | {"choices": [_choice(index, "", None, reason)]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """See AnswerShape."""
        return self._envelope() | {"choices": [], "usage": usage_body(usage)}

    def completion(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        """See AnswerShape."""
        bodies = []
        for index, choice in enumerate(choices):
            entries = choice.logprobs
            logprobs = None if entries is None else parallel_logprobs(entries, TextOffsets())
            bodies.append(_choice(index, "".join(choice.pieces), logprobs, choice.reason))
        return self._envelope() | {"choices": bodies, "usage": usage_body(usage)}

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }


def parallel_logprobs(entries: Sequence[dict[str, Any]], offsets: TextOffsets) -> dict[str, Any]:
    """Return the `logprobs` of a choice: one item per token in each list.

    A token with nothing before it (a prompt's first) has null for its probability and its alternatives.
    """
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [None if math.isnan(entry["logprob"]) else entry["logprob"] for entry in entries],
        "top_logprobs": [_alternatives(entry) for entry in entries],
        "text_offset": [offsets.push(bytes(entry["bytes"])) for entry in entries],
    }


def _alternatives(entry: dict[str, Any]) -> dict[str, float] | None:
    """Return the likeliest tokens, best first, and the one that stands there; the first of equal spelling."""
    if math.isnan(entry["logprob"]):
        return None
    found: dict[str, float] = {}
    for token in (*entry["top_logprobs"], entry):
        found.setdefault(token["token"], token["logprob"])
    return found


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
