"""The library is built once, by whom it belongs to, or there is one line that says why not."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from kvhive.toolchain import build_cache
from kvhive.toolchain.build_cache import KEPT, cached_library
from kvhive.toolchain.compiler import BuildError, Compiler, cpu_flags

AVX2 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"))
AVX512 = AVX2 | frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))


@pytest.mark.parametrize(
    ("machine", "features", "flags"),
    [
        ("x86_64", AVX512, ("-march=x86-64-v3",)),
        ("x86_64", AVX2, ("-march=x86-64-v3",)),
        ("x86_64", frozenset({"sse2"}), ()),
        ("aarch64", frozenset(), ("-march=armv8-a",)),
        ("riscv64", frozenset(), ()),
    ],
)
def test_flags_follow_the_cpu(machine, features, flags):
    assert cpu_flags(machine, features) == flags


def test_the_fingerprint_depends_on_sources_flags_and_compiler(tmp_path):
    source = tmp_path / "a.cpp"
    source.write_text("int a;")
    compilers = [
        Compiler(("g++",), "12", ("-O3",)),
        Compiler(("g++",), "13", ("-O3",)),
        Compiler(("g++",), "12", ("-O2",)),
    ]
    prints = {compiler.fingerprint([source]) for compiler in compilers}
    source.write_text("int b;")
    prints.add(compilers[0].fingerprint([source]))
    assert len(prints) == 4


def test_a_library_is_built_once(tmp_path):
    built = []

    def build(path):
        built.append(path)
        path.write_bytes(b"library")

    for _ in range(2):
        with cached_library("native", "f00", build, tmp_path / "kvhive") as path:
            assert path == tmp_path / "kvhive" / "native-f00.so"
            assert path.read_bytes() == b"library"
    assert len(built) == 1
    assert (tmp_path / "kvhive").stat().st_mode & 0o777 == 0o700


def test_only_the_libraries_used_last_are_kept(tmp_path):
    def build(path):
        path.write_bytes(b"library")
        time.sleep(0.02)

    names = [f"{i}" for i in range(KEPT + 2)]
    for name in [*names, "0", "1"]:
        with cached_library("native", name, build, tmp_path / "kvhive"):
            pass
    kept = sorted(path.name for path in (tmp_path / "kvhive").glob("*.so"))
    assert kept == sorted(f"native-{name}.so" for name in ["0", "1", *names[-KEPT + 2 :]])


def test_two_processes_at_once_build_once(tmp_path):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from kvhive.toolchain.build_cache import cached_library\n"
        "def build(path):\n"
        "    print('built'); time.sleep(1); path.write_bytes(b'library')\n"
        "with cached_library('native', 'f00', build, Path(sys.argv[1])) as path:\n"
        "    assert path.read_bytes() == b'library'\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "kvhive")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(printed) == ["", "", "built\n"]


def test_a_directory_of_somebody_else_is_refused(tmp_path, monkeypatch):
    (tmp_path / "kvhive").mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with (
        pytest.raises(BuildError, match=f"belongs to user {owner}, not to {owner + 1}"),
        cached_library("native", "f00", lambda path: path.write_bytes(b""), tmp_path / "kvhive"),
    ):
        pass


def test_a_file_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "kvhive").mkdir(mode=0o700)
    path = tmp_path / "kvhive" / "native-f00.so"
    path.write_bytes(b"")
    path.chmod(0o722)
    with (
        pytest.raises(BuildError, match="others may write"),
        cached_library("native", "f00", lambda path: None, tmp_path / "kvhive"),
    ):
        pass


def test_a_link_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kvhive").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(BuildError, match="symbolic link"),
        cached_library("native", "f00", lambda path: None, tmp_path / "kvhive"),
    ):
        pass


def test_where_nothing_can_be_written_a_temporary_directory_serves(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no directory can be made below a file")
    with cached_library(
        "native", "f00", lambda path: path.write_bytes(b"library"), tmp_path / "file" / "kvhive"
    ) as path:
        assert path.read_bytes() == b"library"
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.parent.exists()


def test_a_build_that_never_ends_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(build_cache, "COMPILE_SECONDS", 0.2)
    with cached_library("native", "a", lambda path: path.write_bytes(b""), tmp_path / "kvhive"):
        pass
    with (
        build_cache._locked(tmp_path / "kvhive", "native"),
        pytest.raises(BuildError, match="another process has been building"),
        cached_library("native", "b", lambda path: None, tmp_path / "kvhive"),
    ):
        pass
