"""Where built libraries are kept, so that a machine compiles them once.

A library is code that will run here, so its directory and file must be the user's own and writable by nobody
else. Names are hashes of everything a library depends on: what has the right name is right.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvhive.toolchain.compiler import COMPILE_SECONDS, BuildError

KEPT = 4
"""Libraries of a name that stay: those of a few versions and environments that take turns on one machine."""

_LOCK_POLL_SECONDS = 0.05


def cache_directory() -> Path:
    """Return $XDG_CACHE_HOME/kvhive or ~/.cache/kvhive. Raises OSError for a user without a home."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "kvhive"
    try:
        return Path.home() / ".cache" / "kvhive"
    except RuntimeError as error:  # a user without a name, as in some containers
        raise OSError(f"no home directory: {error}") from error


@contextlib.contextmanager
def cached_library(
    name: str, fingerprint: str, build: Callable[[Path], None], directory: Path | None = None
) -> Iterator[Path]:
    """Give the path of the library of that name and fingerprint, built by `build(path)` if it is not there.

    name:       what it is, so that nobody waits for the building of something else
    directory:  cache_directory() unless given

    Safe with several processes at once: one builds, the others wait. Where the directory cannot be written
    the library is built into a temporary one that is gone afterwards, so load it inside the `with`. If that
    ends in an OSError, what is there is no library and is forgotten: the next start builds another. Raises
    BuildError when the build fails, or when the directory or the file is not the user's own.
    """
    try:
        directory = cache_directory() if directory is None else directory
        path = _found_or_built(name, fingerprint, build, directory)
    except OSError:
        with tempfile.TemporaryDirectory(prefix=f"kvhive-{name}-") as temporary:
            build(path := Path(temporary) / f"{name}.so")
            yield path
        return
    try:
        yield path
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _found_or_built(name: str, fingerprint: str, build: Callable[[Path], None], directory: Path) -> Path:
    with _locked(directory, name):
        path = directory / f"{name}-{fingerprint}.so"
        if not path.exists():
            _build_whole(path, build)
        _check_own(path)
        os.utime(path)
        _forget_oldest(directory, name)
    return path


@contextlib.contextmanager
def _locked(directory: Path, name: str) -> Iterator[None]:
    """Hold a name's lock in the directory, which is made. Raises BuildError if another holds it too long."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    _check_own(directory)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(directory / f"{name}.lock", flags, 0o600)
    try:
        deadline = time.monotonic() + COMPILE_SECONDS
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise BuildError(
                    f"{directory}: another process has been building for {COMPILE_SECONDS:.0f} s"
                )
            time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(lock)


def _build_whole(path: Path, build: Callable[[Path], None]) -> None:
    """Build beside the path and rename: what has the name is never half a library."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        build(unfinished)
        unfinished.chmod(0o700)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _check_own(path: Path) -> None:
    """Raise BuildError if the file or directory is a link, somebody else's, or writable by others."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise BuildError(f"{path}: is a symbolic link")
    if status.st_uid != os.geteuid():
        raise BuildError(f"{path}: belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{path}: others may write to it")


def _forget_oldest(directory: Path, name: str) -> None:
    """Keep the KEPT libraries of a name that were used last. A process that has loaded one keeps its own."""
    libraries = sorted(directory.glob(f"{name}-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in libraries[KEPT:]:
        path.unlink(missing_ok=True)
