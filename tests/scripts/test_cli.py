"""The command line without a cluster: usage, one-line errors, overrides."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvhive.proto.config import to_mapping
from kvhive.proto.errors import ConfigError
from kvhive.scripts.up_command import first_difference, read_config


def kvhive(state_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvhive.scripts.cli", *arguments],
        env={**os.environ, "KVHIVE_STATE_DIR": str(state_dir)},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=state_dir,
    )


@pytest.mark.parametrize("command", [("status",), ("status", "--json"), ("generate", "x"), ("chat", "x")])
def test_a_command_without_a_cluster_says_so_in_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    result = kvhive(tmp_path, *command)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("kvhive: no cluster 'default' is up")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "command"),
    [("../x", ("down",)), ("/tmp", ("status",)), (".", ("generate", "x")), ("", ("chat", "x"))],
)
def test_a_name_that_leads_out_of_the_state_folder_is_refused(
    tmp_path: Path, name: str, command: tuple[str, ...]
) -> None:
    """By each command; all that are none: test_cluster_state.py."""
    result = kvhive(tmp_path, command[0], "--cluster", name, *command[1:])
    assert result.returncode == 1
    assert result.stderr.startswith("kvhive: cluster: must be") and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_stopping_nothing_is_no_error_and_leaves_nothing(tmp_path: Path) -> None:
    result = kvhive(tmp_path, "down")
    assert result.returncode == 0
    assert "nothing to stop" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("status", "--nonsense"), ("generate",), ("down", "--grace", "-1")]
)
def test_wrong_usage_is_status_2(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert kvhive(tmp_path, *arguments).returncode == 2


def test_the_version_is_the_distributions(tmp_path: Path) -> None:
    assert kvhive(tmp_path, "version").stdout.startswith("kvhive 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.yaml",), "missing.yaml cannot be read"),
        (("--set", "workers.cout=2"), "workers.cout: unknown key, did you mean 'count'"),
        (("--set", "nonsense.count=2"), "unknown key 'nonsense.count'"),
        (("--set", "workers.count=many"), "workers.count: must be int"),
        (("--set", "model.path=/does/not/exist"), "/does/not/exist"),
        (("--cluster", "Not/Good"), "cluster: must be"),
        (("--set", "redis.url=localhost:6379"), "redis.url: has another scheme; it must be redis://"),
        (("--set", "redis.url=redis://127.0.0.1:1/0"), "redis.url: no Redis answers there"),
    ],
)
def test_up_refuses_a_bad_configuration_in_one_line_and_leaves_nothing(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = kvhive(tmp_path, "up", *arguments)
    assert result.returncode == 1
    assert message in result.stderr.splitlines()[-1]
    assert sum(line.startswith("kvhive: ") for line in result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_attaching_where_nobody_listens_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    began = time.monotonic()
    result = kvhive(tmp_path, "up", "--address", "127.0.0.1:1", "--set", "workers.count=0")
    assert result.returncode == 1
    assert "no Ray cluster answers at '127.0.0.1:1'" in result.stderr.splitlines()[-1]
    assert time.monotonic() - began < 30
    assert list(tmp_path.iterdir()) == []


def test_overrides_are_yaml_and_the_name_wins(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("metadata: {kvhive: {cluster: blue, workers: {count: 3}}}")
    config = read_config(
        file, "red", ["workers.count=5", "redis.lease_s=2.5", "model.name=tiny", "redis.url="]
    )
    assert (config.cluster, config.workers.count, config.redis.lease_s) == ("red", 5, 2.5)
    assert (config.model.name, config.redis.url) == ("tiny", "")


def test_an_override_must_be_a_pair() -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        read_config(None, None, ["workers.count"])


def test_the_first_key_that_differs_is_named_by_its_whole_path() -> None:
    old = to_mapping(read_config(None, None, ()))
    new = to_mapping(read_config(None, None, ["redis.lease_s=6", "workers.count=3", "router.http_port=1"]))
    assert first_difference(old, new) == ("workers.count", 2, 3)
    assert first_difference(old, to_mapping(read_config(None, "red", ()))) == ("cluster", "default", "red")
    assert first_difference(new, new) is None
    assert first_difference({}, new) == ("cluster", None, "default")
