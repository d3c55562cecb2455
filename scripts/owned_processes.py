"""Which processes belong to a cluster, and how to end exactly those.

Everything a cluster starts inherits KVHIVE_RUNTIME_DIR, the unique runtime directory of that one start.
A process is ours when its environment, command line or working directory says so (servers that retitle
themselves overwrite the first two). So nothing is lost when a start is interrupted half-way, and a
reused pid is never mistaken: pids that are written down carry their start time. Linux only (/proc).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

RUNTIME_DIR_VARIABLE = "KVHIVE_RUNTIME_DIR"
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
        if entry.isdigit() and int(entry) != os.getpid() and _mentions(int(entry), runtime_dir):
            process = identify(int(entry))
            if process is not None:
                found.append(process)
    return found


def end_processes(processes: Callable[[], Iterable[ProcessId]], grace_s: float) -> int:
    """Send SIGTERM, wait up to `grace_s`, then SIGKILL; `processes` is asked again each time.

    Returns how many were running at first. Whoever survives even SIGKILL is left to the caller to find.
    """
    running = [process for process in processes() if is_alive(process)]
    if not running:
        return 0
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_WAIT_S)):
        deadline = time.monotonic() + wait_s
        for process in processes():
            send_signal(process, number)
        while any(is_alive(process) for process in processes()):
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        else:
            break
    return len(running)


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Signal this very process; False when it is gone. A pidfd closes the race with a reused pid."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _mentions(pid: int, runtime_dir: Path) -> bool:
    folder = Path(f"/proc/{pid}")
    needle = os.fsencode(runtime_dir)
    try:
        if needle in (folder / "cmdline").read_bytes():
            return True
        entry = os.fsencode(RUNTIME_DIR_VARIABLE) + b"=" + needle
        if entry in (folder / "environ").read_bytes().split(b"\0"):
            return True
        return Path(os.readlink(folder / "cwd")).is_relative_to(runtime_dir)
    except OSError:  # gone meanwhile, or another user's
        return False
