"""Is `redis.url` a Redis that answers? Asked before anything is started, so that a typo costs no minutes."""

from __future__ import annotations

import asyncio

import redis

from kvhive.proto.errors import ConfigError
from kvhive.proto.index_schema import IndexKeys
from kvhive.proto.redis_url import RedisTarget, parse_redis_url
from kvhive.router.redis_connection import open_redis

_WIDTH = 200
"""Of a foreign error's text in our one line."""


def check_redis(url: str, timeout_s: float) -> None:
    """Parse the URL and ask what is there. Raises ConfigError, which never shows the URL or its password."""
    target = parse_redis_url(url)
    try:
        asyncio.run(_ask(url, timeout_s))
    except (redis.TimeoutError, TimeoutError) as error:
        raise ConfigError(f"redis.url: no answer within {timeout_s:g} s (redis.timeout_s)") from error
    except redis.AuthenticationError as error:
        raise ConfigError("redis.url: the Redis there refuses this user or password") from error
    except redis.exceptions.NoPermissionError as error:
        raise ConfigError(
            "redis.url: this user lacks rights on keys kvhive:* (docs/index.md has the list)"
        ) from error
    except (redis.RedisError, OSError, ValueError) as error:
        raise ConfigError(f"redis.url: no Redis answers there: {_reason(error, target)}") from error


async def _ask(url: str, timeout_s: float) -> None:
    client = open_redis(url, timeout_s)
    try:
        # A look-up rather than a PING: a user who may not read the index is as good as none.
        async with asyncio.timeout(2 * timeout_s):
            await client.exists(IndexKeys("default").workers)
    finally:
        await client.aclose()


def _reason(error: Exception, target: RedisTarget) -> str:
    reason = " ".join(str(error).split())[:_WIDTH] or type(error).__name__
    for options in (target.options, target.sentinel_options):
        password = options.get("password")
        if password:
            reason = reason.replace(str(password), "***")
    return reason
