"""A wall clock that can be set, for one process and its children, as if it were a host of its own."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest


class HostClock:
    """Processes with this `environment` see a clock that is off as `set` says; monotonic time stays true."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.set(0)
        self.environment = {"LD_PRELOAD": str(library), "HOST_CLOCK": str(file)}

    def set(self, seconds: int) -> None:
        """Let it be so many seconds off from now on."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("l", seconds))


def build_host_clock(folder: Path) -> Path:
    """Compile the library that stands between a process and its clock; skips the test without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no cc on PATH, to build a clock that can be set")
    library = folder / "host_clock.so"
    source = Path(__file__).with_name("host_clock.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library
