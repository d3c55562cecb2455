"""How a worker reaches the index: one server, the master that sentinels name, or a cluster; and fail fast."""

from __future__ import annotations

from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException

from kvhive.proto.redis_url import RedisKind, parse_redis_url


def open_index(url: str, timeout_s: float) -> Redis:
    """A client whose commands fail after about `timeout_s`; nothing is connected until the first one.

    The publisher's own loop tries again, so the client does so only once, for a connection that was closed
    while it was idle. Raises ConfigError for a URL that is none.
    """
    target = parse_redis_url(url)
    bounds: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    options: dict[str, Any] = {**target.options, **bounds, "retry": Retry(NoBackoff(), 1)}
    if target.kind is RedisKind.SENTINEL:
        asking = {**target.sentinel_options, **bounds, "retry": Retry(NoBackoff(), 0)}
        sentinels: Any = Sentinel  # untyped in redis-py
        client = sentinels(target.nodes, sentinel_kwargs=asking).master_for(target.service, **options)
        return cast(Redis, client)
    if target.kind is RedisKind.CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in target.nodes]
        return cast(Redis, _Cluster(startup_nodes=nodes, **options))
    for host, port in target.nodes:
        options |= {"host": host, "port": port}
    return Redis(**options)


class _Cluster(RedisCluster):
    """A cluster that is away raises a RedisError, which redis-py's own exception for it is not."""

    async def initialize(self, *args: Any, **kwargs: Any) -> RedisCluster:
        try:
            return await super().initialize(*args, **kwargs)
        except RedisClusterException as error:
            raise RedisConnectionError(str(error)) from error

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().execute_command(*args, **kwargs)
        except RedisClusterException as error:
            raise RedisConnectionError(str(error)) from error
