"""The state file: private, whole or absent, and locked by whoever starts or stops."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvhive.proto.config import parse_config
from kvhive.proto.errors import ClusterError, ConfigError
from kvhive.scripts.cluster_state import ClusterState, RaySession, StateFolder, choose_cluster, state_root
from kvhive.scripts.owned_processes import ProcessId
from kvhive.scripts.router_process import RouterSpec

FULL = ClusterState(
    cluster="default",
    runtime_dir="/tmp/kvhive-x",
    cluster_token="token-of-cluster",
    config={"workers": {"count": 2}, "redis": {"url": "redis://:password@h"}},
    ready=True,
    ray=RaySession("127.0.1.1:1", "token-of-ray", ProcessId(1, 2)),
    redis_url="redis://:password@127.0.0.1:3/0",
    redis=ProcessId(4, 5),
    router=ProcessId(6, 7),
    grpc="127.0.0.1:8",
    http="http://127.0.0.1:9",
    workers=("w1", "w2"),
)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "kvhive", "default")


def test_what_is_saved_is_read_back(folder: StateFolder) -> None:
    for state in (FULL, ClusterState("default", "/tmp/kvhive-x", "token")):
        folder.save(state)
        assert folder.load() == state


def test_the_state_is_for_this_user_only(folder: StateFolder) -> None:
    folder.save(FULL)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.parent.stat().st_mode) == 0o700


def test_a_printed_state_shows_no_secret() -> None:
    assert "token-of" not in repr(FULL) and "password" not in repr(FULL)
    spec = RouterSpec(FULL.config, FULL.redis_url, FULL.cluster_token, "m", "m", "00", 1, 1, "r")  # type: ignore[arg-type]
    assert "token-of" not in repr(spec) and "password" not in repr(spec)
    assert "password" not in repr(parse_config({"redis": {"url": FULL.redis_url}}))


def test_removing_leaves_no_file_and_no_folder(folder: StateFolder, tmp_path: Path) -> None:
    with folder.lock():
        folder.save(FULL)
        folder.remove()
    assert list((tmp_path / "kvhive").iterdir()) == []


def test_no_state_is_none_and_a_damaged_one_is_an_error_that_names_the_file(folder: StateFolder) -> None:
    assert folder.load() is None
    folder.save(FULL)
    for damage in ("", "[]", "{}", '{"cluster": 1}', "\x00"):
        folder.path.write_text(damage)
        with pytest.raises(ClusterError, match=r"state\.json"):
            folder.load()


def test_a_cluster_that_is_not_there_is_one_line(folder: StateFolder) -> None:
    with pytest.raises(ClusterError, match=r"^no cluster 'default' is up [^\n]*$"):
        folder.require()


def test_only_one_command_starts_or_stops_a_cluster_at_a_time(folder: StateFolder) -> None:
    with folder.lock(), pytest.raises(ClusterError, match="another command"), folder.lock():
        pass
    with folder.lock():
        pass


def test_a_lock_dies_with_its_holder(folder: StateFolder) -> None:
    code = (
        "import os, sys, pathlib; from kvhive.scripts.cluster_state import StateFolder\n"
        f"with StateFolder(pathlib.Path({str(folder.path.parent.parent)!r}), 'default').lock(): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 9
    with folder.lock():
        pass


def test_the_state_root_follows_the_environment() -> None:
    assert state_root({"KVHIVE_STATE_DIR": "/a", "XDG_STATE_HOME": "/b"}) == Path("/a")
    assert state_root({"XDG_STATE_HOME": "/b"}) == Path("/b/kvhive")
    assert state_root({}) == Path(os.path.expanduser("~/.local/state/kvhive"))


def test_without_a_name_the_only_cluster_is_meant_and_otherwise_the_default(tmp_path: Path) -> None:
    assert choose_cluster(tmp_path, None).cluster == "default"
    StateFolder(tmp_path, "blue").save(FULL)
    assert choose_cluster(tmp_path, None).cluster == "blue"
    StateFolder(tmp_path, "red").save(FULL)
    assert choose_cluster(tmp_path, None).cluster == "default"
    assert choose_cluster(tmp_path, "red").cluster == "red"
    for name in ("../x", "", "a/b", ".", "Red"):
        with pytest.raises(ConfigError, match="cluster: must be"):
            choose_cluster(tmp_path, name)
