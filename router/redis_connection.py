"""How this room talks to Redis: fail fast, back off with jitter, and never lose a cancellation."""

from __future__ import annotations

import asyncio
import random

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

MAX_BACKOFF_S = 1.0


def open_redis(url: str, timeout_s: float) -> Redis:
    """A client whose commands fail after about `timeout_s`. Nothing is connected until the first command.

    One immediate retry covers a connection that the server has closed while it was idle. Raises ValueError
    for a URL that redis-py does not know.
    """
    return Redis.from_url(
        url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 1)
    )


def backoff_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row: doubling from 50 ms to MAX_BACKOFF_S, with jitter."""
    longest = min(MAX_BACKOFF_S, 0.05 * 2.0 ** min(max(0, failures - 1), 10))
    return longest * random.uniform(0.5, 1.0)


def raise_if_cancelled() -> None:
    """Raise CancelledError where the running task was cancelled and the cancellation got lost.

    Python 3.11's wait_for, with which the client sends, can swallow one; a loop that only ends by
    cancellation would go on for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
