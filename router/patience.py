"""How long a request is waited for: by its caller, by `router.queue_timeout_s`, and as a prediction."""

from __future__ import annotations

from dataclasses import dataclass

from kvhive.proto.errors import TimedOut


@dataclass(frozen=True, slots=True)
class Patience:
    """All in seconds, of one clock; infinity is no limit."""

    since: float
    """From when on it has been waiting for a token."""
    queue_timeout_s: float
    """How long it may wait so."""
    deadline: float
    """Until when its caller waits."""
    max_predicted_s: float
    """How late the first token may be expected, when it is placed."""

    def left_s(self, now: float) -> float:
        """Return how long it may wait from now on."""
        return min(self.since + self.queue_timeout_s, self.deadline) - now

    def predicted_within_s(self, now: float) -> float:
        """Return how many seconds from now its first token may be expected at the latest."""
        return min(self.left_s(now), self.max_predicted_s)

    def bound(self, now: float) -> str:
        """Name what `predicted_within_s` comes from."""
        if self.max_predicted_s <= self.left_s(now):
            return f"router.max_predicted_ttft_s is {self.max_predicted_s:g}"
        return self._limit()

    def over(self, now: float, worker_id: str) -> TimedOut:
        """Say that it has waited in vain: for the worker, or for any where that is empty."""
        where = f"for a token of worker {worker_id}" if worker_id else "for a worker"
        return TimedOut(
            f"waited {now - self.since:.1f} s {where}: {self._limit()}",
            cause="deadline" if self._deadline_first else "queue_timeout",
        )

    @property
    def _deadline_first(self) -> bool:
        return self.deadline < self.since + self.queue_timeout_s

    def _limit(self) -> str:
        if self._deadline_first:
            return f"the call's deadline is {self.deadline - self.since:.1f} s"
        return f"router.queue_timeout_s is {self.queue_timeout_s:g}"
