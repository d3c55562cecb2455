"""The shell entry points: runnable, strict, and free of syntax errors."""

import os
import subprocess
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
