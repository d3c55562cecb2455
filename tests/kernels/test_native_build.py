"""The native kernels are built at first use, or there is one line that says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvhive.kernels.native import operators
from kvhive.kernels.native.operators import native_operators
from kvhive.toolchain.compiler import Compiler, sources_in


def test_no_compiler_is_one_line_and_the_reference(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native_operators(required=False) is None
    (record,) = caplog.records
    assert "plain torch computes instead reason=no C++ compiler: tried no-such-compiler" in record.message
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        native_operators(required=True)


def test_a_compiler_that_fails_is_one_line_and_leaves_nothing(monkeypatch, caplog, tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho oh no >&2\nexit 3\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert native_operators(required=False) is None
    (record,) = caplog.records
    assert "failed with status 3: oh no" in record.message
    assert [path.name for path in (tmp_path / "cache" / "kvhive").iterdir()] == ["native.lock"]


def test_a_broken_library_in_the_cache_is_one_line(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = tmp_path / "kvhive"
    directory.mkdir(mode=0o700)
    sources = sources_in(Path(operators.__file__).parent)
    path = directory / f"native-{Compiler.found().fingerprint(sources)}.so"
    path.write_bytes(b"not a library")
    path.chmod(0o700)
    assert native_operators(required=False) is None
    assert "plain torch computes instead" in caplog.text
    assert not path.exists(), "so that the next start builds it anew"


def test_importing_builds_nothing(tmp_path):
    code = "import kvhive.kernels.native.operators, kvhive.kernels.operators"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    assert not list(tmp_path.iterdir())
