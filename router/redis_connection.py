"""How this room talks to Redis: fail fast."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def open_redis(url: str, timeout_s: float) -> Redis:
    """A client whose commands fail after about `timeout_s`. Nothing is connected until the first command.

    One immediate retry covers a connection that the server has closed while it was idle. Raises ValueError
    for a URL that redis-py does not know.
    """
    return Redis.from_url(
        url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 1)
    )
