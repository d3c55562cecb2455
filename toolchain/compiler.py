"""Turns C++ sources into a shared library, for the CPU of this machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMPILE_SECONDS = 300.0
"""One core of a busy machine needs under a minute; a compiler that takes longer than this hangs."""

_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp-simd",
    "-pthread",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    # Results are what the sources say: multiply-add only where they ask for it.
    "-ffp-contract=off",
    # No flag of the C library is looked at, and no trap is taken, so the loops may be vectorised.
    "-fno-math-errno",
    "-fno-trapping-math",
)
_AVX2 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"))


class BuildError(Exception):
    """The library cannot be had on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler and what it is told."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]

    @classmethod
    def found(cls) -> Compiler:
        """Return that of $CXX, or the first of g++, clang++ and c++. Raises BuildError without one."""
        named = shlex.split(os.environ.get("CXX", ""))
        names = [named] if named else [[name] for name in _COMPILERS]
        for name, *options in names:
            if path := shutil.which(name):
                version = _output((path, *options, "--version"), 60.0).partition("\n")[0]
                for_this_cpu = cpu_flags(platform.machine(), cpu_features())
                return cls((path, *options), version, (*_FLAGS, *for_this_cpu))
        raise BuildError(f"no C++ compiler: tried {', '.join(name[0] for name in names)}")

    def fingerprint(self, sources: Sequence[Path]) -> str:
        """Return a hash of everything that the library depends on."""
        digest = hashlib.sha256()
        for text in (*self.command, self.version, *self.flags):
            digest.update(text.encode() + b"\0")
        for source in sources:
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        return digest.hexdigest()[:32]

    def build(self, sources: Sequence[Path], target: Path) -> None:
        """Compile and link; headers among the sources are only included. Raises BuildError."""
        units = [str(source) for source in sources if source.suffix == ".cpp"]
        _output((*self.command, *self.flags, *units, "-o", str(target)), COMPILE_SECONDS)


def sources_in(folder: Path) -> list[Path]:
    """Return the C++ sources and headers of a folder, in a fixed order."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))


def cpu_flags(machine: str, features: frozenset[str]) -> tuple[str, ...]:
    """Return what the compiler may assume of the CPU.

    machine:   platform.machine()
    features:  flags of /proc/cpuinfo
    """
    if machine == "x86_64":
        # AVX-512 machines too: the sources compile for x86-64-v4, but have not been run there yet. With one
        # width of vectors, workers on either kind of machine compute the same bits.
        return ("-march=x86-64-v3",) if features >= _AVX2 else ()
    return ("-march=armv8-a",) if machine == "aarch64" else ()


def cpu_features() -> frozenset[str]:
    """Return the flags of the first CPU in /proc/cpuinfo; none where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def _output(command: Sequence[str], seconds: float) -> str:
    """Run a command and return what it prints. Raises BuildError with the end of what it complained of."""
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, text=True, errors="replace", timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        complaint = " ".join(done.stderr.split())[-500:]
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {complaint}")
    return done.stdout
