"""Which workers have just failed a request: skipped for a while, then tried by one request at a time.

The pause doubles with every failure that follows a pause, so that a worker which accepts everything and
fails always costs one request a failover now and then, not every request. Its first token ends all that.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_DOUBLINGS = 4
"""Sixteen times `router.failure_cooldown_s`, 80 s by default: nothing is out for ever."""


@dataclass(slots=True)
class _Trouble:
    failures: int
    """Pauses so far."""
    until: float
    """End of the present one."""
    trial_until: float = 0.0
    """Until then one request is trying it."""


class WorkerHealth:
    """Remembers failures by worker id; forgets at the first success. Times are monotonic seconds."""

    def __init__(self, cooldown_s: float) -> None:
        """Prepare; a pause of 0 s means that nothing is remembered."""
        self._cooldown_s = cooldown_s
        self._troubles: dict[str, _Trouble] = {}

    def __bool__(self) -> bool:
        """Whether any worker is in trouble."""
        return bool(self._troubles)

    def failed(self, worker_id: str, now: float) -> float:
        """A request failed for the worker's sake; return how long it is skipped.

        Requests that were there together fail together: that is one failure.
        """
        trouble = self._troubles.get(worker_id)
        if trouble is not None and now < trouble.until:
            return trouble.until - now
        failures = trouble.failures + 1 if trouble else 1
        pause_s: float = self._cooldown_s * 2.0 ** min(failures - 1, MOST_DOUBLINGS)
        if pause_s:
            self._troubles[worker_id] = _Trouble(failures, now + pause_s)
        return pause_s

    def placed(self, worker_id: str, now: float) -> None:
        """A request is on its way there; if the worker is on trial, it is the one that tries."""
        trouble = self._troubles.get(worker_id)
        if trouble is not None:
            trouble.trial_until = now + self._cooldown_s

    def succeeded(self, worker_id: str, now: float) -> None:
        """A request got its first token there; in a pause that is an old one, and says nothing."""
        trouble = self._troubles.get(worker_id)
        if trouble is not None and now >= trouble.until:
            del self._troubles[worker_id]

    def forget(self, worker_id: str) -> None:
        """The worker has left, or is a new process."""
        self._troubles.pop(worker_id, None)

    def pause_s(self, worker_id: str, now: float) -> float:
        """Seconds for which it is to be skipped because it failed."""
        trouble = self._troubles.get(worker_id)
        return max(0.0, trouble.until - now) if trouble else 0.0

    def is_tried(self, worker_id: str, now: float) -> bool:
        """Whether a request is trying it just now."""
        trouble = self._troubles.get(worker_id)
        return trouble is not None and now < trouble.trial_until
