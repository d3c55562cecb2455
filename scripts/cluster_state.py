"""What `kvhive up` writes down so that `down`, `status` and `generate` find the cluster.

    ${KVHIVE_STATE_DIR:-${XDG_STATE_HOME:-~/.local/state}/kvhive}/<cluster>/state.json     0600 in 0700

It is saved before and after each step of a start, so that a crash at any point leaves enough to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvhive.proto.config import check_cluster_name
from kvhive.proto.errors import ClusterError
from kvhive.scripts.owned_processes import ProcessId

DEFAULT_CLUSTER = "default"
_PARTS = "redis", "router", "controller", "supervisor"


@dataclass(frozen=True, slots=True)
class RaySession:
    """The Ray cluster that runs the workers."""

    address: str
    """host:port of its GCS."""
    auth_token: str = field(default="", repr=False)
    """Ours to hand on when we started the head; empty when attached: the environment has it."""
    head: ProcessId | None = None
    """The head that we started; None when attached to a Ray cluster that is not ours."""

    @property
    def owned(self) -> bool:
        """Whether the Ray cluster is ours to stop."""
        return bool(self.auth_token)


@dataclass(frozen=True, slots=True)
class ClusterState:
    """One cluster, as far as it was started."""

    cluster: str
    runtime_dir: str
    """Sockets, logs and Ray's session; also the mark by which our processes are known."""
    cluster_token: str = field(repr=False)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What it was started with: the mapping of `config.to_mapping`."""
    ready: bool = False
    """Every worker serves and the router answers."""
    ray: RaySession | None = None
    redis_url: str = field(default="", repr=False)
    redis: ProcessId | None = None
    """The embedded server; None when the URL is the operator's."""
    router: ProcessId | None = None
    controller: ProcessId | None = None
    """What creates and retires workers."""
    supervisor: ProcessId | None = None
    """What starts the others again when they end; from `ready` on it alone writes here."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """How often it had to, by part."""
    grpc: str = ""
    """host:port of kvhive.v1."""
    http: str = ""
    """Base URL of the HTTP doors."""
    workers: tuple[str, ...] = ()
    """Its first workers. Which there are now is Ray's to say."""


def state_root(environ: Mapping[str, str]) -> Path:
    """Return the folder that holds one folder per cluster."""
    if folder := environ.get("KVHIVE_STATE_DIR"):
        return Path(folder)
    home = environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "kvhive"


class StateFolder:
    """The folder of one cluster's state."""

    def __init__(self, root: Path, cluster: str) -> None:
        self.cluster = cluster
        self.root = root
        self._folder = root / cluster

    @property
    def path(self) -> Path:
        """The state file."""
        return self._folder / "state.json"

    def load(self) -> ClusterState | None:
        """Return the state; None when no cluster of this name was started. Raises ClusterError."""
        try:
            raw = json.loads(self.path.read_text())
            return _parse(raw)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ClusterError(f"{self.path}: not a readable state file ({error}); delete it") from error

    def require(self) -> ClusterState:
        """Return the state of a cluster that is up. Raises ClusterError, in one line, when it is not."""
        state = self.load()
        if state is None:
            raise ClusterError(f"no cluster {self.cluster!r} is up (start one with `kvhive up`)")
        if not state.ready:
            raise ClusterError(f"cluster {self.cluster!r} is not up yet, or its start was cut off")
        return state

    def save(self, state: ClusterState) -> ClusterState:
        """Write the state atomically and return it."""
        self._make()
        fresh = self.path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(state), file, indent=2)
        os.replace(fresh, self.path)
        return state

    def remove(self) -> None:
        """Delete the state and the cluster's folder."""
        for name in (self.path, self.path.with_suffix(".new"), self._folder / "lock"):
            name.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the right to start or stop this cluster. Raises ClusterError when somebody else has it."""
        descriptor = self._open_lock()
        try:
            yield
        finally:
            os.close(descriptor)

    def _open_lock(self) -> int:
        while True:
            self._make()
            descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(descriptor)
                raise ClusterError(
                    f"cluster {self.cluster!r} is being started or stopped by another command"
                ) from error
            # `remove` deletes the file while holding it: a lock on a deleted file guards nothing.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._folder / "lock").st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)

    def _make(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)


def choose_cluster(root: Path, name: str | None) -> StateFolder:
    """Return the named cluster's folder; without a name `default`, or the only one that there is.

    Raises ConfigError when the name cannot be a cluster's.
    """
    if name is None:
        found = sorted(path.parent.name for path in root.glob("*/state.json"))
        name = found[0] if len(found) == 1 else DEFAULT_CLUSTER
    return StateFolder(root, check_cluster_name(name))


def _parse(raw: dict[str, Any]) -> ClusterState:
    ray = raw["ray"]
    if ray is not None:
        ray = RaySession(**{**ray, "head": _process(ray["head"])})
    processes = {name: _process(raw[name]) for name in _PARTS}
    return ClusterState(**{**raw, **processes, "ray": ray, "workers": tuple(raw["workers"])})


def _process(raw: dict[str, int] | None) -> ProcessId | None:
    return None if raw is None else ProcessId(**raw)
