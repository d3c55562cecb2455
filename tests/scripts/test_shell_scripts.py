"""The shell entry points: runnable, strict, and free of syntax errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = ("scripts/quickstart", "scripts/test", "scripts/check", ".ci/run")


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_point_is_executable_and_strict(entry: str) -> None:
    path = ROOT / entry
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text


@pytest.mark.parametrize("script", [*ENTRIES, "scripts/venv.sh"])
def test_a_script_parses(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=30)


def test_quickstart_refuses_unknown_arguments_before_it_does_anything(tmp_path: Path) -> None:
    result = subprocess.run(
        [str(ROOT / "scripts/quickstart"), "--nonsense"],
        env={**os.environ, "KVHIVE_VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 2
    assert "usage:" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_environment_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    code = f"source {ROOT}/scripts/venv.sh; PYTHON={old} find_python"
    result = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=30)
    assert result.returncode == 1
    assert "Python 3.11 or newer" in result.stderr


def test_ci_keeps_its_hands_off_the_callers_environment(tmp_path: Path) -> None:
    """It tests a clone; the caller's venv must not be pointed at that."""
    origin = tmp_path / "origin"
    for name, text in (
        (".ci/run", (ROOT / ".ci/run").read_text()),
        ("scripts/test", '#!/bin/sh\necho "venv=${KVHIVE_VENV-none} arguments=$*"\n'),
    ):
        (origin / name).parent.mkdir(parents=True)
        (origin / name).write_text(text)
        (origin / name).chmod(0o755)
    git = ["git", "-C", str(origin), "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True, timeout=30)
    environment = {**os.environ, "KVHIVE_VENV": "/precious", "TMPDIR": str(tmp_path / "t")}
    (tmp_path / "t").mkdir()
    result = subprocess.run(
        [str(origin / ".ci/run"), "-k", "x"], env=environment, capture_output=True, text=True, timeout=30
    )
    assert result.stdout == "venv=none arguments=-k x\n", result.stderr
    assert list((tmp_path / "t").iterdir()) == []


@pytest.mark.parametrize(("arguments", "up_before"), [(["--exit"], True), (["--exit"], False), ([], False)])
def test_quickstart_stops_only_a_cluster_that_it_started(
    tmp_path: Path, arguments: list[str], up_before: bool
) -> None:
    bin_folder, log = tmp_path / "venv" / "bin", tmp_path / "log"
    bin_folder.mkdir(parents=True)
    kvhive = f'#!/bin/sh\necho "$1" >>{log}\n[ "$1" != status ] || exit {0 if up_before else 1}\n'
    for name, text in (("python", "#!/bin/sh\n"), ("kvhive", kvhive)):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    environment = {**os.environ, "KVHIVE_VENV": str(tmp_path / "venv"), "PYTHON": sys.executable}
    result = subprocess.run(
        [str(ROOT / "scripts/quickstart"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 0, result.stderr
    stops = bool(arguments) and not up_before
    assert log.read_text().split() == ["status", *["up"] * (not up_before), *["down"] * stops]
    assert ("left up" in result.stderr) == (bool(arguments) and up_before)
