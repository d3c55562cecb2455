"""The embedded Redis: a real server that is private, found by its URL, and gone after stop."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import pytest
import redis

from kvhive.proto.errors import ClusterError
from kvhive.scripts import embedded_redis
from kvhive.scripts.embedded_redis import MAX_MEMORY_BYTES, EmbeddedRedis


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_serves_behind_a_password_and_leaves_nothing(tmp_path: Path) -> None:
    """The URL works, no password does not, nobody else may read the folder, and stop removes everything."""
    folder = tmp_path / "redis"
    with EmbeddedRedis(folder) as server:
        pid = server.pid
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
            assert client.config_get("save") == {"save": ""}
            limits = client.config_get("maxmemory", "maxmemory-policy")
            assert limits == {"maxmemory": str(MAX_MEMORY_BYTES), "maxmemory-policy": "noeviction"}
            port = client.connection_pool.connection_kwargs["port"]
        with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "redis.conf").stat().st_mode) == 0o600
        password = server.url.split(":")[2].split("@")[0]
        assert password.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert os.getsid(pid) != os.getsid(0)
    assert _gone(pid)
    assert not folder.exists()
    server.stop()


def test_a_second_loopback_address(tmp_path: Path) -> None:
    """Any loopback address may be given, and only that one is bound."""
    with EmbeddedRedis(tmp_path / "r", host="127.0.1.7") as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
            port = client.connection_pool.connection_kwargs["port"]
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_only_loopback(tmp_path: Path) -> None:
    """An address that others can reach is refused before anything is started."""
    server = EmbeddedRedis(tmp_path / "r", host="0.0.0.0")
    with pytest.raises(ClusterError, match=r"redis\.url"):
        server.start()
    with pytest.raises(ClusterError, match="not started"):
        server.url  # noqa: B018


def test_a_taken_port_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When somebody binds the port first, the next one is tried."""
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        ports = [squatter.getsockname()[1], embedded_redis._free_port("127.0.0.1")]
        monkeypatch.setattr(embedded_redis, "_free_port", lambda host: ports.pop(0))
        with EmbeddedRedis(tmp_path / "r") as server, redis.Redis.from_url(server.url) as client:
            assert client.ping()
        assert ports == []


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The error carries the server's own words, and the folder is gone."""
    server = EmbeddedRedis(tmp_path / "r", max_memory=-1)
    with pytest.raises(ClusterError, match=r"(?s)ended with 1:.*maxmemory"):
        server.start()
    assert not (tmp_path / "r").exists()


def test_restart_after_a_crash_keeps_the_address(tmp_path: Path) -> None:
    """A killed server comes back empty under the same URL."""
    with EmbeddedRedis(tmp_path / "r") as server, redis.Redis.from_url(server.url) as client:
        client.set("a", 1)
        with pytest.raises(ClusterError, match="still runs"):
            server.restart()
        os.kill(server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        url = server.url
        server.restart()
        assert server.url == url
        assert client.get("a") is None


def test_a_stopped_process_is_killed(tmp_path: Path) -> None:
    """A server that does not react to SIGTERM is killed after the grace."""
    server = EmbeddedRedis(tmp_path / "r")
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop(grace_s=0.2)
    assert _gone(pid)
