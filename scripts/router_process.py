"""The router as a child process: what it is told, and how it says that it is ready.

It is told by a file (`spec.json`, 0600: it holds the cluster's token) and answers with another
(`ready.json`), written atomically once both doors are open.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvhive.client import ONCE, Client
from kvhive.proto.errors import ClusterError, Unavailable
from kvhive.router.auth.cluster_secret import operator_key
from kvhive.scripts.detached_process import launch_module
from kvhive.scripts.log_tail import last_line
from kvhive.scripts.owned_processes import ProcessId, identify

START_TIMEOUT_S = 90.0
_ROUTABLE_TIMEOUT_S = 30.0
_POLL_S = 0.1
READY_FILE = "ready.json"
"""In the runtime directory: where the router listens."""
SPEC_FILE = "router.json"
"""... and what it is told."""
_LOG = "router.log"


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Everything that a router process needs, in plain values."""

    config: dict[str, Any] = field(repr=False)
    """The mapping of `config.to_mapping`."""
    redis_url: str = field(repr=False)
    cluster_token: str = field(repr=False)
    model_path: str
    model_name: str
    model_identity: str
    """Hex."""
    max_context: int
    """Tokens."""
    vocab_size: int
    ready_file: str

    def save(self, path: Path) -> None:
        """Write the spec atomically, for this user only: on a full disk the one before it stays whole."""
        fresh = path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)
        os.replace(fresh, path)

    @classmethod
    def load(cls, path: Path) -> RouterSpec:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True, slots=True)
class ReadyRouter:
    """The ports that the router got."""

    grpc: str
    """host:port."""
    http: str
    """Base URL."""

    def save(self, path: Path) -> None:
        """Write atomically, so that a reader never sees half of it."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self)))
        os.replace(fresh, path)

    @classmethod
    def load(cls, path: Path) -> ReadyRouter:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text()))


def launch_router(runtime_dir: Path) -> subprocess.Popen[bytes]:
    """Start a router of the spec in a runtime directory, and wait for nothing."""
    return launch_module("kvhive.scripts.serve", str(runtime_dir / SPEC_FILE), log=runtime_dir / _LOG)


def keep_ports(runtime_dir: Path, grpc: str, http: str) -> None:
    """Let the next router of a runtime directory have the ports that clients know."""
    path = runtime_dir / SPEC_FILE
    spec = RouterSpec.load(path)
    ports = {"grpc_port": _port(grpc), "http_port": _port(http)}
    router = {**spec.config["router"], **ports}
    replace(spec, config={**spec.config, "router": router}).save(path)


class StartingRouter:
    """A router that has been started and opens its doors by and by."""

    def __init__(
        self, runtime_dir: Path, spec: RouterSpec, started: Callable[[ProcessId | None], None]
    ) -> None:
        """Start it; `started` gets the process at once."""
        self._ready, self._log = Path(spec.ready_file), runtime_dir / _LOG
        spec.save(runtime_dir / SPEC_FILE)
        self._process = launch_router(runtime_dir)
        started(identify(self._process.pid))

    def wait_ready(self) -> ReadyRouter:
        """Wait until its doors are open. Raises ClusterError when it dies or does not get ready in time."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready.exists():
            if (status := self._process.poll()) is not None:
                raise ClusterError(f"the router ended with status {status}: {last_line(self._log)}")
            if time.monotonic() > deadline:
                said = last_line(self._log)
                raise ClusterError(f"the router was not ready after {START_TIMEOUT_S:g} s: {said}")
            time.sleep(_POLL_S)
        return ReadyRouter.load(self._ready)


def wait_routable(grpc_target: str, cluster_token: str, count: int) -> None:
    """Wait until the router sends requests to `count` workers. Raises ClusterError after 30 s.

    A worker whose model files or block size are not the router's is never routable.
    """
    deadline = time.monotonic() + _ROUTABLE_TIMEOUT_S
    routable = 0
    with Client(grpc_target, api_key=operator_key(cluster_token), retry=ONCE) as client:
        while True:
            try:
                routable = sum(worker.routable for worker in client.cluster().workers)
            except Unavailable:
                routable = 0
            if routable >= count:
                return
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"after {_ROUTABLE_TIMEOUT_S:g} s the router accepts {routable} of {count} workers "
                    "(is the model the same everywhere?)"
                )
            time.sleep(_POLL_S)


def _port(endpoint: str) -> int:
    return int(endpoint.rstrip("/").rpartition(":")[2])
