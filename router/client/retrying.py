"""When a call that was refused is sent again: never what may have done something, and not for ever."""

from __future__ import annotations

from dataclasses import dataclass

from kvhive.proto.errors import KvhiveError, Overloaded, Unavailable

LAST = 2**31
"""The number of an attempt that no other may follow."""
FIRST_S = 0.5
"""The first wait where the server says nothing; each further one is twice as long."""
SPREAD = 0.5
"""Those who were refused together come back over half as long again as they wait."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how patiently. A stream is sent again only while nothing of it has come."""

    attempts: int = 4
    """All together, the first one too."""
    longest_wait_s: float = 30.0
    """A server that wants more patience than this is taken at its word: its error is raised."""

    def wait_s(self, error: KvhiveError, attempt: int, chance: float) -> float | None:
        """Return how long to wait after attempt number `attempt` (the first is 1), or None to give up.

        chance: a random number between 0 and 1
        """
        if attempt >= self.attempts or not isinstance(error, Overloaded | Unavailable):
            return None
        # What a server says is spread already.
        known = error.retry_after_s
        wait_s = FIRST_S * 2.0 ** (attempt - 1) * (1.0 + SPREAD * chance) if known is None else known
        return wait_s if wait_s <= self.longest_wait_s else None


ONCE = Retry(attempts=1)
"""Never again."""
