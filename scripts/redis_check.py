"""Is `redis.url` a Redis that answers? Asked before anything is started, so that a typo costs no minutes."""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvhive.proto.errors import ConfigError

_WIDTH = 200
"""Of a foreign error's text in our one line."""


def check_redis(url: str, timeout_s: float) -> None:
    """Parse the URL and PING what is there. Raises ConfigError, which never shows the URL or its password."""
    try:
        client = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        )
    except (ValueError, TypeError):
        # Its own text may quote a piece of a password with a `/` or `#` in it: no cause, no quote.
        raise ConfigError(
            "redis.url: must be redis://[[user]:password@]host:port/db, rediss:// or unix:// "
            "(percent-encode what is special in a password)"
        ) from None
    with client:
        try:
            client.ping()
        except redis.TimeoutError as error:
            raise ConfigError(f"redis.url: no answer within {timeout_s:g} s (redis.timeout_s)") from error
        except redis.AuthenticationError as error:
            raise ConfigError("redis.url: the Redis there refuses this user or password") from error
        except (redis.RedisError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:_WIDTH] or type(error).__name__
            password = client.connection_pool.connection_kwargs.get("password")
            if password:
                reason = reason.replace(str(password), "***")
            raise ConfigError(f"redis.url: no Redis answers there: {reason}") from error
