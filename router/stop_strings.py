"""Stop strings over streamed text: cut at the first one, hold back no more than must be.

The match that is complete first ends the output, whatever the chunking; of matches that complete
at the same character the longest counts. Neither the stop string nor anything after it is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Matches all stop strings at once. One per request; O(number of stops) per character.

    For each stop it keeps how many of its leading characters the text ends with (Knuth-Morris-Pratt), so
    the held text is exactly the longest suffix that may still become a stop.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Prepare for `stops`, none of which may be empty."""
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(dict.fromkeys(stops))
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self._stopped = False
        self.stop = ""
        """The stop string that ended the output, if one did."""

    def push(self, text: str, may_end: bool = True) -> tuple[str, bool]:
        """Return the text that may be emitted now, and whether a stop string ended the output.

        After the end, nothing more is emitted. While the output may not end yet, a stop string that is
        completed is text like any other.
        """
        if self._stopped:
            return "", True
        if not self._stops:
            return text, False
        pending = self._held + text
        for position in range(len(self._held), len(pending)):
            length = self._advance(pending[position])
            if length and may_end:
                self._stopped = True
                self._held = ""
                start = position + 1 - length
                self.stop = pending[start : position + 1]
                return pending[:start], True
        keep = max(self._matched)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return pending[:cut], False

    def flush(self) -> str:
        """Return the held text: the output ended otherwise, so it was no stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> int:
        """Take one character; return the length of the longest stop that it completes, or 0."""
        longest = 0
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = self._failures[index][matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                longest = max(longest, matched)
                matched = self._failures[index][-1]  # for an output that goes on
            self._matched[index] = matched
        return longest


def _failure_table(pattern: str) -> list[int]:
    """Return, for each prefix of `pattern`, how long its longest proper prefix is that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table
