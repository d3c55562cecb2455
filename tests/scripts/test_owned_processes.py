"""Ours and only ours: found by the runtime directory, ended for good, never a reused pid."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhive.scripts.owned_processes import (
    RUNTIME_DIR_VARIABLE,
    ProcessId,
    end_processes,
    identify,
    is_alive,
    processes_of,
    send_signal,
)

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
)


@pytest.fixture
def spawn() -> Iterator[object]:
    children: list[subprocess.Popen[bytes]] = []

    def start(*command: str, **options: object) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()


def known(pid: int) -> ProcessId:
    process = identify(pid)
    assert process is not None
    return process


def eventually(check: object) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if check():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def test_a_process_is_found_by_environment_command_line_or_working_directory(spawn, tmp_path: Path) -> None:
    elsewhere = tmp_path / "other"
    ours = tmp_path / "ours"
    for folder in (ours, elsewhere):
        folder.mkdir()
    by_environment = spawn("sleep", "60", env={**os.environ, RUNTIME_DIR_VARIABLE: str(ours)})
    by_command = spawn("tail", "-f", "/dev/null", str(ours / "missing"), stderr=subprocess.DEVNULL)
    by_directory = spawn("sleep", "60", cwd=ours)
    foreign = spawn("sleep", "60", env={**os.environ, RUNTIME_DIR_VARIABLE: str(elsewhere)})
    expected = {by_environment.pid, by_command.pid, by_directory.pid}
    assert eventually(lambda: {process.pid for process in processes_of(ours)} == expected)
    assert foreign.pid not in {process.pid for process in processes_of(ours)}


def test_this_process_is_never_among_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert processes_of(tmp_path) == []


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(spawn) -> None:
    child = spawn(sys.executable, "-c", STUBBORN)
    child.stdout.readline()
    process = known(child.pid)
    began = time.monotonic()
    assert end_processes(lambda: [process], grace_s=0.3) == 1
    assert 0.3 <= time.monotonic() - began < 5
    assert child.wait(5) == -signal.SIGKILL


def test_ending_what_is_gone_does_nothing(spawn) -> None:
    child = spawn("true")
    process = identify(child.pid)
    child.wait()
    assert process is None or end_processes(lambda: [process], grace_s=1.0) == 0


def test_a_reused_pid_is_not_signalled(spawn) -> None:
    child = spawn("sleep", "60")
    impostor = ProcessId(child.pid, known(child.pid).started - 1)
    assert not is_alive(impostor)
    assert not send_signal(impostor, signal.SIGKILL)
    assert end_processes(lambda: [impostor], grace_s=0.1) == 0
    assert child.poll() is None


def test_a_zombie_counts_as_gone(spawn) -> None:
    child = spawn("sleep", "60")
    process = known(child.pid)
    child.send_signal(signal.SIGKILL)
    assert eventually(lambda: not is_alive(process))
