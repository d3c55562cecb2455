"""Worker, registry and mirror over every kind of Redis that redis.url can name, with real servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from index_rig import KEYS, agrees, key, routing, stored, worker
from redis_fixtures import eventually
from redis_kinds import cluster, free_port, make_certificate, port_of, sentinel, server, tls_in_front_of

from kvhive.proto.errors import ConfigError
from kvhive.router.redis_connection import open_redis
from kvhive.scripts.redis_check import check_redis
from kvhive.worker.index_connection import open_index

TIMEOUT_S = 1.0


@contextlib.asynccontextmanager
async def both_ends(url: str) -> AsyncIterator[tuple[redis.asyncio.Redis, redis.asyncio.Redis]]:
    """A worker's client and a router's."""
    ends = open_index(url, TIMEOUT_S), open_redis(url, TIMEOUT_S)
    try:
        yield ends
    finally:
        for end in ends:
            await end.aclose()


async def serves_an_index(url: str) -> None:
    """Two workers register, publish and leave, and a router follows."""
    await asyncio.to_thread(check_redis, url, TIMEOUT_S)
    async with (
        both_ends(url) as (theirs, ours),
        worker(theirs, "w1") as w1,
        worker(theirs, "w2") as w2,
        routing(ours) as router,
    ):
        w1.add(stored(*range(5000)))
        w2.add(stored(1, 2, 3))
        await agrees(router, w1, "w1")
        await agrees(router, w2, "w2")
        w2.add(stored(4))
        await agrees(router, w2, "w2")
        assert router.reader.counters.resyncs == 0
        await w1.close()
        await eventually(lambda: [v.record.worker_id for v in router.registry.views()] == ["w2"])


async def test_a_cluster(tmp_path: Path) -> None:
    """No script, transaction or read names keys of two slots: a cluster would refuse it."""
    with cluster(tmp_path / "cluster") as url:
        await serves_an_index(url)


async def test_a_cluster_that_is_away_is_named(tmp_path: Path) -> None:
    url = f"redis+cluster://:secret@127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match="no Redis answers there") as caught:
        await asyncio.to_thread(check_redis, url, TIMEOUT_S)
    assert "secret" not in str(caught.value)


async def test_a_user_of_an_access_list(tmp_path: Path) -> None:
    """The rights that docs/index.md names are enough; a user without them is refused before the start."""
    with server(tmp_path / "acl") as client:
        rights = ("~kvhive:*", "+@read", "+@write", "+@scripting", "+@connection", "+time")
        client.execute_command("ACL SETUSER", "kvhive", "on", ">pa/ss", *rights)
        client.execute_command("ACL SETUSER", "other", "on", ">pass", "~other:*", "+@all")
        client.execute_command("ACL SETUSER", "default", "off")
        port = port_of(client)
        await serves_an_index(f"redis://kvhive:pa%2Fss@127.0.0.1:{port}")
        with pytest.raises(ConfigError, match="lacks rights on keys kvhive"):
            await asyncio.to_thread(check_redis, f"redis://other:pass@127.0.0.1:{port}", TIMEOUT_S)
        with pytest.raises(ConfigError, match="refuses this user or password"):
            await asyncio.to_thread(check_redis, f"redis://kvhive:wrong@127.0.0.1:{port}", TIMEOUT_S)


async def test_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with server(tmp_path / "unix", config=f"unixsocket {path}"):
        await serves_an_index(f"unix://{path}")


async def test_tls_with_an_authority_of_ones_own(tmp_path: Path) -> None:
    """A certificate that ssl_ca_certs vouches for is trusted; one that nobody vouches for is not."""
    private, certificate = make_certificate(tmp_path)
    with server(tmp_path / "tls") as client:
        async with tls_in_front_of(port_of(client), private, certificate) as port:
            await serves_an_index(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}")
            with pytest.raises(ConfigError, match="no Redis answers there"):
                await asyncio.to_thread(check_redis, f"rediss://127.0.0.1:{port}", TIMEOUT_S)


async def test_a_failover_that_loses_the_tail(tmp_path: Path) -> None:
    """The replica that takes over lacks the newest batches: both ends find the new master, the worker tells
    everything anew under a new epoch, and the router ends with what the worker holds."""
    with sentinel(tmp_path / "pair") as (url, master, replica, watcher):
        await eventually(lambda: replica.info("replication")["master_link_status"] == "up", 10)
        await eventually(lambda: watcher.sentinel_slaves("main") != [], 15)
        async with both_ends(url) as (theirs, ours), worker(theirs) as w1, routing(ours) as router:
            w1.add(stored(*range(3000)))
            await agrees(router, w1)
            epoch = w1.epoch
            await eventually(lambda: replica.exists(KEYS.blocks("w1", epoch)) == 1)
            # From here on the replica hears nothing more; it does not know that it lags.
            replica.config_set("masterauth", "wrong")
            master.config_set("requirepass", "changed")
            master.execute_command("AUTH", "changed")
            master.client_kill_filter(_type="replica")
            await eventually(lambda: replica.info("replication")["master_link_status"] == "down")
            master.config_set("requirepass", "")
            w1.add(stored(*range(5000, 5100)))
            await agrees(router, w1)
            assert replica.scard(KEYS.blocks("w1", epoch)) == 3000
            master.shutdown(nosave=True)
            await eventually(lambda: w1.epoch > epoch, 20)
            await agrees(router, w1)
            assert router.knows("w1") == {key(n) for n in (*range(3000), *range(5000, 5100))}
            assert replica.info("replication")["role"] == "master"
