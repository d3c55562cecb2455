"""The Redis of a chaos run: one server, or a master with a replica that a sentinel puts in its place."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import redis

from kvhive.proto.errors import ClusterError
from kvhive.scripts.embedded_redis import find_server
from kvhive.scripts.log_tail import last_line
from kvhive.scripts.private_network import Place, command_inside

SERVICE = "main"
ANSWER_TIMEOUT_S = 1.0
WHOLE_WITHIN_S = 60.0
"""Longest that servers may take to be one master, and its replica in step, after a fault has ended."""
_POLL_S = 0.1
_SENTINEL_LINES = (
    "sentinel monitor {service} {host} {port} 1",
    "sentinel down-after-milliseconds {service} 1500",
    "sentinel failover-timeout {service} 4000",
)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on just now."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


class RedisServer:
    """One server process that comes back at the same address, empty. Calls block."""

    def __init__(self, folder: Path, host: str, place: Place | None, lines: tuple[str, ...] = ()) -> None:
        """Prepare; `place` is the network namespace that it runs in, `lines` more of its configuration."""
        self._folder = folder
        self._place = place
        self._lines = lines
        self._process: subprocess.Popen[bytes] | None = None
        self.host = host
        self.port = 6379 if place else free_port(host)
        self.sentinel = any(line.startswith("sentinel") for line in lines)

    @property
    def pid(self) -> int:
        """Its process id, the last one when it has ended."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers. Raises ClusterError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "redis.conf"
        own = ("save ''", "appendonly no", "protected-mode no", "repl-diskless-sync-delay 0", *self._lines)
        lines = (f"bind {self.host}", f"port {self.port}", f"dir {self._folder}", *own)
        if not config.exists():  # else a sentinel has written there who follows whom by now
            config.write_text("\n".join(lines) + "\n")
        command = [find_server(), str(config), *(["--sentinel"] if self.sentinel else [])]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command_inside(self._place, command), stdout=log, stderr=log, start_new_session=True
            )
        with self.client() as client:
            _until(lambda: bool(client.ping()), 10.0, f"Redis at {self.host}:{self.port} answers", self._log)

    def signal(self, what: signal.Signals) -> None:
        """Send its process a signal."""
        os.kill(self.pid, what)

    def end(self, gently: bool = False) -> None:
        """End it, frozen or not; again does no harm."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM if gently else signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
                return
            self._process.kill()
            self._process.wait()

    def client(self) -> redis.Redis:
        """Return a client of it, to be closed."""
        limit_s = ANSWER_TIMEOUT_S
        return redis.Redis(
            host=self.host, port=self.port, socket_timeout=limit_s, socket_connect_timeout=limit_s
        )

    def _log(self) -> str:
        return last_line(self._folder / "log")


class ChaosRedis:
    """All its servers, as one thing that can be struck. Calls block; a context manager."""

    def __init__(self, folder: Path, host: str, places: tuple[Place, ...], sentinel: bool) -> None:
        """Prepare; servers listen at `places`, or all at `host` when there are none."""
        wanted = 2 if sentinel else 1
        at: list[Place | None] = list(places[:wanted]) or [None] * wanted
        self.servers = [
            RedisServer(folder / f"redis{n}", place.address if place else host, place)
            for n, place in enumerate(at, 1)
        ]
        self.watcher: RedisServer | None = None
        if sentinel:
            first, second = self.servers
            self.servers[1] = RedisServer(
                folder / "redis2", second.host, at[1], (f"replicaof {first.host} {first.port}",)
            )
            watched = {"service": SERVICE, "host": first.host, "port": first.port}
            lines = tuple(line.format(**watched) for line in _SENTINEL_LINES)
            self.watcher = RedisServer(folder / "sentinel", host, None, lines)

    @property
    def url(self) -> str:
        """For `redis.url`."""
        if self.watcher is not None:
            return f"redis+sentinel://{self.watcher.host}:{self.watcher.port}/{SERVICE}"
        return f"redis://{self.servers[0].host}:{self.servers[0].port}/0"

    @property
    def addresses(self) -> list[str]:
        """Of all servers."""
        return [server.host for server in self.servers]

    def __enter__(self) -> ChaosRedis:
        with contextlib.ExitStack() as undo:
            undo.callback(self.end)
            for server in [*self.servers, *([self.watcher] if self.watcher else [])]:
                server.start()
            self.wait_whole()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End all servers."""
        for server in [*self.servers, *([self.watcher] if self.watcher else [])]:
            server.end()

    def pids(self) -> set[int]:
        """Return the process ids of all servers."""
        return {server.pid for server in [*self.servers, *([self.watcher] if self.watcher else [])]}

    def master(self) -> RedisServer:
        """Return the server that is master now. Raises RedisError or OSError when nobody says so."""
        if self.watcher is None:
            return self.servers[0]
        with self.watcher.client() as client:
            host, port = client.sentinel_get_master_addr_by_name(SERVICE)
        return next(s for s in self.servers if (s.host, s.port) == (_text(host), int(port)))

    def fail_over(self) -> None:
        """Tell the sentinel to make the replica master. Raises RedisError when it will not."""
        assert self.watcher is not None, "there is no sentinel"
        with self.watcher.client() as client:
            client.execute_command("SENTINEL FAILOVER", SERVICE)

    def wait_whole(self) -> None:
        """Wait until one server is master and the other one, if any, follows it. Raises ClusterError."""
        _until(self._is_whole, WHOLE_WITHIN_S, "Redis is whole again")

    def _is_whole(self) -> bool:
        master = self.master()
        for server in self.servers:
            with server.client() as client:
                role = client.execute_command("ROLE")
            wanted = "master" if server is master else "slave"
            if _text(role[0]) != wanted or (wanted == "slave" and _text(role[3]) != "connected"):
                return False
        return True


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _until(condition: Callable[[], bool], within_s: float, what: str, log: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + within_s
    while True:
        trouble = ""
        try:
            if condition():
                return
        except (redis.RedisError, OSError, StopIteration) as error:
            trouble = repr(error)
        if time.monotonic() > deadline:
            raise ClusterError(f"not within {within_s:g} s: {what} {trouble} {log()}")
        time.sleep(_POLL_S)
