"""Which processes belong to a cluster, and how to end exactly those.

Everything a cluster starts inherits KVHIVE_RUNTIME_DIR, the unique runtime directory of that one start, and
runs as the user who owns that directory, away from any terminal. All three must hold, so that a pager on a
log, or a shell that went into the directory, is never ended. A Redis that retitles itself overwrites its
environment; it is known by its own folder in there, where nothing else runs as a Redis.

So nothing is lost when a start is interrupted half-way, and a reused pid is never mistaken: pids that are
written down carry their start time. Linux only (/proc).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

RUNTIME_DIR_VARIABLE = "KVHIVE_RUNTIME_DIR"
_REDIS_NAMES = ("redis", "valkey")
_POLL_S = 0.05
_KILL_WAIT_S = 5.0
"""After SIGKILL only the kernel is left to wait for."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for good: its pid, and its start in clock ticks since boot."""

    pid: int
    started: int


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a running process; None when there is none, or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name is in parentheses and may contain spaces and parentheses of its own.
    fields = stat.rpartition(")")[2].split()
    state, started = fields[0], fields[19]
    return None if state in "ZX" else ProcessId(pid, int(started))


def is_alive(process: ProcessId | None) -> bool:
    """Whether this very process still runs."""
    return process is not None and identify(process.pid) == process


def processes_of(runtime_dir: Path) -> list[ProcessId]:
    """Return every process of the start that made `runtime_dir`, never this process itself."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and _belongs(int(entry), runtime_dir):
            process = identify(int(entry))
            if process is not None:
                found.append(process)
    return found


def end_processes(processes: Callable[[], Iterable[ProcessId]], grace_s: float) -> int:
    """Send SIGTERM, wait up to `grace_s`, then SIGKILL; `processes` is asked again each time.

    Returns how many were running at first. Whoever survives even SIGKILL is left to the caller to find;
    what the kernel does not let us signal is not ours, and is neither counted nor waited for.
    """

    def ours() -> list[ProcessId]:
        return [process for process in processes() if is_alive(process) and _may_signal(process)]

    running = ours()
    if not running:
        return 0
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_WAIT_S)):
        deadline = time.monotonic() + wait_s
        for process in ours():
            send_signal(process, number)
        while ours():
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        else:
            break
    return len(running)


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Signal this very process; False when it is gone or somebody else's.

    A pidfd closes the race with a reused pid.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def _may_signal(process: ProcessId) -> bool:
    try:
        os.kill(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _belongs(pid: int, runtime_dir: Path) -> bool:
    folder = Path(f"/proc/{pid}")
    try:
        if folder.stat().st_uid != _owner(runtime_dir) or _has_terminal(folder):
            return False
        entry = os.fsencode(RUNTIME_DIR_VARIABLE) + b"=" + os.fsencode(runtime_dir)
        if entry in (folder / "environ").read_bytes().split(b"\0"):
            return True
        program = os.path.basename(os.readlink(folder / "exe"))
        inside = Path(os.readlink(folder / "cwd")).is_relative_to(runtime_dir)
        return inside and program.startswith(_REDIS_NAMES) and os.getsid(pid) == pid
    except OSError:  # gone meanwhile, or another user's
        return False


def _owner(runtime_dir: Path) -> int:
    try:
        return runtime_dir.stat().st_uid
    except FileNotFoundError:
        return os.getuid()


def _has_terminal(folder: Path) -> bool:
    return (folder / "stat").read_text().rpartition(")")[2].split()[4] != "0"
