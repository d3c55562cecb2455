"""How this room talks to Redis: one server, the master that sentinels name, or a cluster; and fail fast."""

from __future__ import annotations

from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, ClusterPipeline, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException

from kvhive.proto.redis_url import RedisKind, parse_redis_url


def open_redis(url: str, timeout_s: float) -> Redis:
    """A client whose commands fail after about `timeout_s`. Nothing is connected until the first command.

    One immediate retry covers a connection that the server has closed while it was idle. The client of a
    cluster speaks the same commands, as long as each keeps to the keys of one worker. Raises ConfigError for
    a URL that is none.
    """
    target = parse_redis_url(url)
    options: dict[str, Any] = {
        **target.options,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 1),
    }
    match target.kind:
        case RedisKind.SENTINEL:
            asking = {**target.sentinel_options, "socket_timeout": timeout_s, "retry": Retry(NoBackoff(), 0)}
            sentinels: Any = Sentinel  # untyped in redis-py
            client = sentinels(target.nodes, sentinel_kwargs=asking).master_for(target.service, **options)
            return cast(Redis, client)
        case RedisKind.CLUSTER:
            nodes = [ClusterNode(host, port) for host, port in target.nodes]
            return cast(Redis, _Cluster(startup_nodes=nodes, **options))
    for host, port in target.nodes:
        options |= {"host": host, "port": port}
    return Redis(**options)


def is_cluster(client: Redis) -> bool:
    """Whether keys of different workers may lie on different servers, so that no command may name both."""
    return isinstance(client, RedisCluster)


def socket_timeout_of(client: Redis) -> float | None:
    """The longest that one answer may take, in seconds."""
    known = client.connection_kwargs if isinstance(client, RedisCluster) else _pool_options(client)
    timeout_s = known.get("socket_timeout")
    return None if timeout_s is None else float(timeout_s)


def _pool_options(client: Redis) -> dict[str, Any]:
    return dict(client.connection_pool.connection_kwargs)


class _Cluster(RedisCluster):
    """Says of a cluster that is away what other clients say: redis-py's own error there is no RedisError."""

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

    def pipeline(self, transaction: bool | None = None, shard_hint: Any = None) -> ClusterPipeline:
        return _Pipeline(self, transaction)  # type: ignore[abstract]


class _Pipeline(ClusterPipeline):
    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        try:
            return await super().execute(raise_on_error, allow_redirections)
        except RedisClusterException as error:
            raise RedisConnectionError(str(error)) from error
