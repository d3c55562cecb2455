"""Real clusters, as `kvhive up` brings them up. A start takes half a minute, so what can be shared is.

One on the demo model is for all that ask, and in the end for a look at how it goes; one behind keys, on a
tiny model, is for what needs those, and then for what takes a cluster apart.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny
from tiny_tokenizer import BOS, EOS, save_tokenizer, words

UP_TIMEOUT_S = 170
TURNS = ("cluster", "ending_cluster", "private_kvhive", "two_ranks", "keyed_cluster", "ending_keyed_cluster")
"""Fixtures in the order of the tests that use them: what ends a cluster comes after what asks it."""
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


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Put the tests of each cluster together, and the one that ends it behind them."""

    def turn(item: pytest.Function) -> int:
        return max((turn for turn, name in enumerate(TURNS) if name in item.fixturenames), default=0)

    items.sort(key=turn)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, so that workers load it in no time; of layers enough for a stream to last."""
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"vocab_size": len(words()), "num_hidden_layers": 12, "bos_token_id": BOS, "eos_token_id": EOS}
    tiny("Llama", **sizes, max_position_embeddings=2048).save_pretrained(folder)
    save_tokenizer(folder, "gpt-2")
    return folder


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Two CPU workers on the demo model, shared by the tests of a session."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), *TWO_CPU_WORKERS) as running:
        yield running


@pytest.fixture
def ending_cluster(cluster: RunningCluster) -> RunningCluster:
    """The shared cluster, for the one test that ends it."""
    return cluster


@dataclass(frozen=True)
class KeyedCluster(RunningCluster):
    """A cluster with API keys."""

    keys: dict[str, str] = field(default_factory=dict)
    """By name."""


@pytest.fixture(scope="session")
def keyed_cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[KeyedCluster]:
    """Two CPU workers on a tiny model behind keys: alice's, bob's, and root's, who is an admin."""
    folder = tmp_path_factory.mktemp("keyed")
    kvhive = KvhiveCommand(folder)
    keys = {
        name: json.loads(kvhive("keys", "add", name, "--file", "keys", "--json", *options).stdout)["key"]
        for name, options in (("alice", ()), ("bob", ()), ("root", ("--admin",)))
    }
    changes = (f"--set=model.path={tiny_model}", "--set=access.keys_file=keys")
    with running_cluster(folder, *TWO_CPU_WORKERS, *changes) as running:
        yield KeyedCluster(running.kvhive, running.grpc, running.http, running.arguments, keys)


@pytest.fixture
def ending_keyed_cluster(keyed_cluster: KeyedCluster) -> KeyedCluster:
    """The shared cluster behind keys, for the one test that takes it apart."""
    return keyed_cluster


@pytest.fixture
def two_ranks(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[RunningCluster]:
    """Two workers of two ranks each on a tiny model."""
    changes = ("workers.tensor_parallel=2", f"model.path={tiny_model}")
    folder = tmp_path_factory.mktemp("two_ranks")
    with running_cluster(folder, *TWO_CPU_WORKERS, *(f"--set={change}" for change in changes)) as running:
        yield running


@pytest.fixture
def private_kvhive(tmp_path: Path) -> Iterator[KvhiveCommand]:
    """The command with a state directory of the test's own; what the test leaves up is stopped."""
    kvhive = KvhiveCommand(tmp_path)
    yield kvhive
    kvhive("down", "--grace", "0", timeout=120)
