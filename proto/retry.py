"""How a loop that talks to Redis goes on: back off with jitter, and never lose a cancellation."""

from __future__ import annotations

import asyncio
import random

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0

_MOST_DOUBLINGS = 10
"""Beyond MAX_BACKOFF_S by far, so that no count of failures makes a number too large."""


def backoff_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row: doubling from 50 ms to MAX_BACKOFF_S, with jitter."""
    doublings = min(max(0, failures - 1), _MOST_DOUBLINGS)
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0**doublings) * random.uniform(0.5, 1.0)


def raise_if_cancelled() -> None:
    """Raise CancelledError where the running task was cancelled and the cancellation got lost.

    Python 3.11's wait_for, with which the Redis client sends, can swallow one; a loop that only ends by
    cancellation would go on for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
