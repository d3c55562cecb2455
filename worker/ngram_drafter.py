"""Drafts by looking back: what followed the last tokens when they stood in this sequence before.

Also known as prompt lookup decoding (Saxena, 2023). It costs next to nothing and pays where output repeats
the prompt or itself: code edits, extraction, quotes, lists.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as ReadOnly

from kvhive.worker.model_runner import Chunk

MAX_INDEXED_TOKENS = 1 << 17
"""Over all sequences; an indexed token costs about 300 bytes per length of n-gram."""


class NgramDrafter:
    """Implements Drafter. O(1) amortised per token of a sequence and length of n-gram.

    A sequence is known by the identity of `Chunk.history`, which only grows. One that comes as another
    object is indexed afresh: slower, never wrong. What was not asked about for longest is dropped first.
    """

    def __init__(
        self, shortest: int = 2, longest: int = 4, max_indexed_tokens: int = MAX_INDEXED_TOKENS
    ) -> None:
        """Look for n-grams of `longest` down to `shortest` tokens. Raises ValueError unless 1 <= both."""
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams: need 1 <= shortest <= longest, are {shortest} and {longest}")
        self._lengths = range(longest, shortest - 1, -1)
        self._max_indexed_tokens = max_indexed_tokens
        self._indices: OrderedDict[int, _NgramIndex] = OrderedDict()
        self._indexed_tokens = 0

    @property
    def indexed_tokens(self) -> int:
        """Tokens of all sequences that are in memory."""
        return self._indexed_tokens

    def propose(self, chunks: ReadOnly[Chunk]) -> list[list[int]]:
        """Return the drafts of each chunk; see Drafter."""
        return [self._propose(chunk) if chunk.max_drafts else [] for chunk in chunks]

    def _propose(self, chunk: Chunk) -> list[int]:
        key = id(chunk.history)
        index = self._indices.get(key)
        if index is None or index.indexed > len(chunk.history):
            self._drop(key)
            index = self._indices[key] = _NgramIndex(chunk.history, self._lengths)
        self._indices.move_to_end(key)
        self._indexed_tokens += index.catch_up()
        drafts = index.propose(chunk.max_drafts)
        while self._indexed_tokens > self._max_indexed_tokens:
            self._drop(next(iter(self._indices)))
        return drafts

    def _drop(self, key: int) -> None:
        dropped = self._indices.pop(key, None)
        self._indexed_tokens -= dropped.indexed if dropped else 0


class _NgramIndex:
    """Where each n-gram of one sequence was followed last. Holds the history, so that its id stays taken."""

    def __init__(self, history: ReadOnly[int], lengths: range) -> None:
        self._history = history
        self._followers: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in lengths}
        self.indexed = 0

    def catch_up(self) -> int:
        """Take in what the history has gained; return how many tokens that is."""
        history, begin = self._history, self.indexed
        for length, followers in self._followers.items():
            for position in range(max(begin, length), len(history)):
                followers[tuple(history[position - length : position])] = position
        self.indexed = len(history)
        return self.indexed - begin

    def propose(self, count: int) -> list[int]:
        """Return what followed the longest n-gram that now stands at the end, `count` tokens of it.

        The copy may run into itself, so that a short period is repeated as often as is asked for.
        """
        history = self._history
        for length, followers in self._followers.items():
            position = followers.get(tuple(history[-length:]))
            if position is not None:
                drafts: list[int] = []
                for source in range(position, position + count):
                    known = source < len(history)
                    drafts.append(history[source] if known else drafts[source - len(history)])
                return drafts
        return []
