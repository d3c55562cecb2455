"""Turns a worker's token ids into text: whole characters only, up to the first stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvhive.router.detokenizer import IncrementalDetokenizer
from kvhive.router.stop_strings import StopStringMatcher
from kvhive.router.tokenizer import TextTokenizer


class OutputText:
    """The text of one generation. Feed it tokens in order, then `finish` once."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stops: Sequence[str],
        min_tokens: int = 0,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        """Prepare; no stop string that is complete before `min_tokens` tokens ends the text.

        `shown` is the text of special tokens that are to have one.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown)
        self._matcher = StopStringMatcher(stops)
        self._stops = bool(stops)
        self._min_tokens = min_tokens
        self.token_ids: list[int] = []
        """Every token taken in, up to and including the one that completed a stop string."""
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Take in tokens; return the text that is now certain, and the tokens that count.

        Token by token, so that what a worker sent after the token that completed a stop string is dropped.
        """
        if not self._stops:
            self.token_ids.extend(token_ids)
            return self._detokenizer.push(token_ids), tuple(token_ids)
        text, taken = [], 0
        for token in token_ids:
            if self.stopped:
                break
            taken += 1
            self.token_ids.append(token)
            emitted, self.stopped = self._matcher.push(self._detokenizer.push([token]), self.may_end)
            text.append(emitted)
        return "".join(text), tuple(token_ids[:taken])

    def finish(self) -> str:
        """Return what was held back: an incomplete character, the beginning of a stop string."""
        if self.stopped:
            return ""
        emitted, self.stopped = self._matcher.push(self._detokenizer.flush(), self.may_end)
        return emitted + ("" if self.stopped else self._matcher.flush())

    @property
    def stop(self) -> str:
        """The stop string that ended the text, if one did."""
        return self._matcher.stop

    @property
    def may_end(self) -> bool:
        """Whether there are as many tokens as there must be."""
        return len(self.token_ids) >= self._min_tokens
