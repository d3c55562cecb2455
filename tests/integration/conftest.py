"""A real cluster for the whole session: `kvhive up` with two CPU workers on the demo model."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

UP_TIMEOUT_S = 170
TWO_CPU_WORKERS = (
    *("--set", "workers.device=cpu", "--set", "workers.count=2", "--set", "workers.threads=1"),
    *("--set", "model.dtype=float32"),  # what answers are compared with is float32 too
)


@dataclass(frozen=True)
class KvhiveCommand:
    """The `kvhive` command with a private state directory."""

    state_dir: Path
    extra: dict[str, str] = field(default_factory=dict)
    """Added to the environment."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment to run it with; no Ray of somebody else's is in it."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {**inherited, "KVHIVE_STATE_DIR": str(self.state_dir), **self.extra}

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start it in the background."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "kvhive.scripts.cli", *arguments],
            env=self.environment,
            cwd=self.state_dir,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )

    def __call__(
        self, *arguments: str, timeout: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        process = self.popen(*arguments)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.terminate()  # `up` removes what it has started
            process.communicate(timeout=60)
            raise
        if check:
            assert process.returncode == 0, out + err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def state(self, cluster: str = "default") -> dict[str, Any]:
        """The state file."""
        state: dict[str, Any] = json.loads((self.state_dir / cluster / "state.json").read_text())
        return state


@dataclass(frozen=True)
class RunningCluster:
    """A cluster that is up."""

    kvhive: KvhiveCommand
    grpc: str
    """host:port."""
    http: str
    """Base URL."""
    arguments: tuple[str, ...] = ()
    """What it was brought up with."""

    def status(self) -> dict[str, Any]:
        """What `kvhive status --json` prints."""
        status: dict[str, Any] = json.loads(self.kvhive("status", "--json").stdout)
        return status


@contextlib.contextmanager
def running_cluster(state_dir: Path, *arguments: str) -> Iterator[RunningCluster]:
    """Bring a cluster up, and down again."""
    kvhive = KvhiveCommand(state_dir)
    kvhive("up", *arguments, timeout=UP_TIMEOUT_S)
    try:
        state = kvhive.state()
        yield RunningCluster(kvhive, state["grpc"], state["http"], arguments)
    finally:
        kvhive("down", "--grace", "2", timeout=120)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Two CPU workers on the demo model, shared by the tests of a session."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), *TWO_CPU_WORKERS) as running:
        yield running


@dataclass(frozen=True)
class KeyedCluster:
    """A cluster with API keys."""

    kvhive: KvhiveCommand
    keys: dict[str, str]
    """By name."""


@pytest.fixture(scope="module")
def keyed_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedCluster]:
    """One CPU worker on the demo model behind keys: alice's, bob's, and root's, who is an admin."""
    folder = tmp_path_factory.mktemp("keyed")
    kvhive = KvhiveCommand(folder)
    keys = {
        name: json.loads(kvhive("keys", "add", name, "--file", "keys", "--json", *options).stdout)["key"]
        for name, options in (("alice", ()), ("bob", ()), ("root", ("--admin",)))
    }
    one = ("workers.device=cpu", "workers.count=1", "workers.threads=1", "access.keys_file=keys")
    with running_cluster(folder, *(f"--set={each}" for each in one)) as running:
        yield KeyedCluster(running.kvhive, keys)


@pytest.fixture
def two_ranks() -> Callable[[Path, Path], contextlib.AbstractContextManager[RunningCluster]]:
    """Brings up, in a state directory, two workers of two ranks each on a model."""

    def up(folder: Path, model: Path) -> contextlib.AbstractContextManager[RunningCluster]:
        changes = ("workers.tensor_parallel=2", f"model.path={model}")
        return running_cluster(folder, *TWO_CPU_WORKERS, *(f"--set={change}" for change in changes))

    return up


@pytest.fixture
def elastic() -> Callable[[Path, Path], contextlib.AbstractContextManager[RunningCluster]]:
    """Brings up, in a state directory, two workers on a model."""

    def up(folder: Path, model: Path) -> contextlib.AbstractContextManager[RunningCluster]:
        folder.mkdir()
        return running_cluster(folder, *TWO_CPU_WORKERS, f"--set=model.path={model}")

    return up


@pytest.fixture
def private_kvhive(tmp_path: Path) -> Iterator[KvhiveCommand]:
    """The command with a state directory of the test's own; what the test leaves up is stopped."""
    kvhive = KvhiveCommand(tmp_path)
    yield kvhive
    kvhive("down", "--grace", "0", timeout=120)
