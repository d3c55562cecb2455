"""`kvhive keys`: what it writes a router can read, and a key is shown once."""

from __future__ import annotations

import errno
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvhive.proto.config import ClusterConfig, to_mapping
from kvhive.proto.errors import ConfigError
from kvhive.router.auth.cluster_secret import operator_key
from kvhive.router.auth.key_file import read_keys
from kvhive.router.auth.principal import Principal
from kvhive.scripts.cluster_access import callers_key, operators_key
from kvhive.scripts.cluster_state import ClusterState, StateFolder
from kvhive.scripts.keys_command import keys
from kvhive.scripts.up_command import read_config


def run(*arguments: str) -> Result:
    return CliRunner().invoke(keys, arguments, catch_exceptions=False)


def test_a_key_is_added_listed_and_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key = run("add", "alice", "--file", str(path)).output.strip()
    assert read_keys(path).holder(key) == Principal("alice")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("# who may ask\n" + path.read_text())
    path.chmod(0o640)
    options = ("--namespace", "team", "--max-priority", "-1", "--admin", "--json")
    made = json.loads(run("add", "bob", "--file", str(path), *options).output)
    assert read_keys(path).holder(made["key"]) == Principal("bob", "team", -1, True)
    assert key not in path.read_text() and made["key"] not in path.read_text()
    rows = json.loads(run("list", "--file", str(path), "--json").output)
    assert [(row["name"], row["namespace"], row["admin"]) for row in rows] == [
        ("alice", "", False),
        ("bob", "team", True),
    ]
    assert run("list", "--file", str(path)).output.count("\n") == 2
    run("revoke", "alice", "--file", str(path))
    assert read_keys(path).holder(key) is None and read_keys(path).holder(made["key"]) is not None
    assert path.read_text().startswith("# who may ask\n") and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["keys"]
    run("revoke", "bob", "--file", str(path))
    assert run("list", "--file", str(path)).output.startswith("no keys")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "alice"), "name: 'alice' is another key's already"),
        (("add", "kvhive:operator"), "name: must be 1 to 64 of"),
        (("add", "bob", "--namespace", "a b"), "namespace: must be 1 to 64 of"),
        (("revoke", "bob"), r"^[^:]*: has no key 'bob'"),
    ],
)
def test_what_cannot_be_is_refused_and_the_file_stays(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "keys"
    run("add", "alice", "--file", str(path))
    before = path.read_text()
    with pytest.raises(ConfigError, match=message):
        run(*arguments, "--file", str(path))
    assert path.read_text() == before


def test_a_link_stays_one_and_whoever_might_read_the_file_still_may(tmp_path: Path) -> None:
    """Its router may run as another user, who must hear of what is revoked."""
    path, link = tmp_path / "keys", tmp_path / "link"
    link.symlink_to(path)
    run("add", "alice", "--file", str(link))
    assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o664)
    other = 1234 if os.getuid() == 0 else os.getuid()
    os.chown(path, other, -1)
    umask = os.umask(0o077)
    try:
        run("revoke", "alice", "--file", str(link))
    finally:
        os.umask(umask)
    assert link.is_symlink() and len(read_keys(path)) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o664 and path.stat().st_uid == other


def test_a_file_that_cannot_stay_its_owners_is_not_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    run("add", "alice", "--file", str(path))
    before = path.read_text()

    def refuse(*arguments: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(ConfigError, match=r"must stay its owner's .* Operation not permitted"):
        run("revoke", "alice", "--file", str(path))
    assert path.read_text() == before and [each.name for each in tmp_path.iterdir()] == ["keys"]


def test_a_broken_file_is_not_edited(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("nonsense\n")
    with pytest.raises(ConfigError, match=f"{path}: line 1"):
        run("add", "alice", "--file", str(path))
    assert path.read_text() == "nonsense\n"


def test_many_at_once_lose_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda i: keys.main(["add", f"n{i}", "--file", str(path)], standalone_mode=False), range(16)
            )
        )
    assert len(read_keys(path)) == 16


def test_the_file_is_the_running_clusters_or_that_of_the_cluster_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVHIVE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"access.keys_file: is not set here"):
        run("list")
    Path("cluster.yaml").write_text("metadata: {kvhive: {access: {keys_file: mine}}}")
    run("add", "alice")
    assert len(read_keys(tmp_path / "mine")) == 1
    config = read_config(None, None, [])
    assert config.access.keys_file == str(tmp_path / "mine"), "the same from everywhere"
    state = ClusterState("default", str(tmp_path), "token", to_mapping(config))
    StateFolder(tmp_path / "state", "default").save(state)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run("add", "bob")
    assert len(read_keys(tmp_path / "mine")) == 2


def test_a_bad_file_of_keys_is_said_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match=f"access.keys_file: {path}: cannot be read"):
        read_config(None, None, [f"access.keys_file={path}"])
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match=f"access.keys_file: {path}: line 1: sha256"):
        read_config(None, None, [f"access.keys_file={path}"])


def test_commands_show_the_operators_key_or_the_one_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = ClusterState("default", "/run", "token", to_mapping(ClusterConfig()))
    monkeypatch.delenv("KVHIVE_API_KEY", raising=False)
    assert callers_key(state) == operators_key(state) == operator_key("token")
    monkeypatch.setenv("KVHIVE_API_KEY", "kvh-mine")
    assert (callers_key(state), operators_key(state)) == ("kvh-mine", operator_key("token"))
