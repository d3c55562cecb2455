"""Where one answer is in its grammar: which tokens may follow, and whether anything may.

Scheduler and pool only carry it; the runner asks it and leads it on. A grammar that is too much for the
library's limits at some token ends its answer with an error, and no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ReadOnly
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvhive.proto.errors import InvalidRequest, KvhiveError
from kvhive.proto.grammar import in_short
from kvhive.proto.json_schema import FIELD

if TYPE_CHECKING:  # a worker that is never asked for a grammar needs no such library
    from llguidance import LLExecutor, LLMatcher

Mask = npt.NDArray[np.int32]
"""[words]: bit t % 32 of word t // 32 says whether token t may follow."""

MASK_THREADS = 4
"""Masks of one step that are computed at once, at most; they are over before the model's own step is."""


class OutputMatcher:
    """Not thread-safe, but two of one grammar may be used in two threads."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: frozenset[int]) -> None:
        """Begin where `matcher` is.

        vocab_size: tokens that it knows
        ends: those by which the model ends its output
        """
        self.inner = matcher
        self.words = -(-vocab_size // 32)
        self.ends = ends
        self._vocab_size = vocab_size

    def fork(self) -> OutputMatcher:
        """Return another one that is in the same place. Takes a microsecond."""
        return OutputMatcher(self.inner.deep_copy(), self._vocab_size, self.ends)

    @property
    def failure(self) -> KvhiveError | None:
        """Why it can tell nothing any more."""
        if not self.inner.is_error():
            return None
        return InvalidRequest(
            FIELD, f"the grammar is too much to follow here: {in_short(self.inner.get_error())}"
        )

    def take(self, token: int) -> bool:
        """Go on by a token that may follow; return whether nothing can come after it."""
        if token in self.ends:
            return True
        self.inner.consume_token(token)
        return bool(self.inner.is_stopped())

    def follow(self, tokens: Iterable[int]) -> None:
        """Go on by what was generated elsewhere. Raises InvalidRequest at a token that cannot follow."""
        for index, token in enumerate(tokens):
            if self.take(token) and self.inner.is_error():
                raise InvalidRequest(FIELD, f"token {token} at {index} of the output is not of the grammar")

    def allows(self, tokens: ReadOnly[int]) -> int:
        """Return how many of the tokens may follow, one after the other.

        Drafts may repeat ids of the prompt that the library knows nothing of and would end with an error at.
        """
        known = takewhile(lambda token: token < self._vocab_size, tokens)
        return int(self.inner.validate_tokens(list(known)))


class MaskFiller:
    """Computes the masks of a step, several at once."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def fill(self, asked: ReadOnly[tuple[OutputMatcher, ReadOnly[int]]]) -> list[list[Mask]]:
        """Return, for each matcher and its drafts, what may follow before the first draft and after each.

        Where the draft itself may not stand there, or the output ends with it, nobody will read what follows,
        and all may. The matchers stay where they are.
        """
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(MASK_THREADS)
        words = max(matcher.words for matcher, _ in asked)
        firsts, count = [], 0
        for _, drafts in asked:
            firsts.append(count)
            count += 1 + len(drafts)
        rows = np.full((count, words), -1, np.int32)
        plain = [
            (matcher.inner, row) for (matcher, drafts), row in zip(asked, firsts, strict=True) if not drafts
        ]
        ahead = [
            (matcher.inner, row, list(drafts))
            for (matcher, drafts), row in zip(asked, firsts, strict=True)
            if drafts
        ]
        where = (rows.ctypes.data, 4 * words, count)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if ahead:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(ahead, *where)
        return [
            list(rows[first : first + 1 + len(drafts)])
            for (_, drafts), first in zip(asked, firsts, strict=True)
        ]
