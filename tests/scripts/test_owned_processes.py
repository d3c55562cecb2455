"""Ours and only ours: found by the runtime directory, ended for good, never a reused pid."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhive.scripts.embedded_redis import EmbeddedRedis
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
        with child:  # closes its pipe
            child.kill()


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


def environment(runtime_dir: Path) -> dict[str, str]:
    return {**os.environ, RUNTIME_DIR_VARIABLE: str(runtime_dir)}


def test_what_carries_the_directory_in_its_environment_is_ours(spawn, tmp_path: Path) -> None:
    ours = spawn("sleep", "60", env=environment(tmp_path / "ours"), start_new_session=True)
    spawn("sleep", "60", env=environment(tmp_path / "other"), start_new_session=True)
    assert eventually(lambda: [process.pid for process in processes_of(tmp_path / "ours")] == [ours.pid])


def test_a_redis_that_overwrote_its_environment_is_ours_by_its_folder(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        assert [process.pid for process in processes_of(tmp_path)] == [server.pid]
        assert processes_of(tmp_path / "red") == []


def test_a_pager_on_a_log_and_a_shell_inside_are_not_ours(spawn, tmp_path: Path) -> None:
    """Whether or not they lead a session of their own, as over ssh or in a container."""
    log = tmp_path / "router.log"
    log.touch()
    for options in ({}, {"start_new_session": True}):
        spawn("tail", "-f", str(log), **options)
        spawn("sh", "-c", "sleep 60; true", cwd=tmp_path, **options)
    time.sleep(0.3)
    assert processes_of(tmp_path) == []


def test_what_runs_in_a_terminal_is_not_ours(spawn, tmp_path: Path) -> None:
    """A shell in which somebody exported the variable."""
    terminal, inside = os.openpty()
    try:
        command = f"exec 0<{os.ttyname(inside)}; exec sleep 60"
        child = spawn("sh", "-c", command, env=environment(tmp_path), start_new_session=True)
        stat = Path(f"/proc/{child.pid}/stat")
        assert eventually(lambda: stat.read_text().rpartition(")")[2].split()[4] != "0")
        assert processes_of(tmp_path) == []
    finally:
        os.close(inside)
        os.close(terminal)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_users_process_is_not_ours(spawn, tmp_path: Path) -> None:
    spawn("sleep", "60", env=environment(tmp_path), start_new_session=True, user=65534, group=65534)
    time.sleep(0.3)
    assert processes_of(tmp_path) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_what_may_not_be_signalled_is_left_alone_without_a_word(spawn, tmp_path: Path) -> None:
    child = spawn("sleep", "60")
    process = known(child.pid)
    code = (
        "import os, signal, sys; os.setuid(65534)\n"
        "from kvhive.scripts.owned_processes import ProcessId, end_processes, send_signal\n"
        f"one = ProcessId({process.pid}, {process.started})\n"
        "assert not send_signal(one, signal.SIGKILL)\n"
        "sys.exit(end_processes(lambda: [one], grace_s=30))"
    )
    began = time.monotonic()
    # The modules are read before the user changes: nobody may not read a private checkout.
    preloaded = f"import kvhive.scripts.owned_processes\n{code}"
    subprocess.run([sys.executable, "-P", "-c", preloaded], check=True, timeout=20)
    assert time.monotonic() - began < 15
    assert is_alive(process)


def test_this_process_is_never_among_them(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from kvhive.scripts.owned_processes import processes_of\n"
        f"sys.exit(len(processes_of(pathlib.Path({str(tmp_path)!r}))))"
    )
    command = [sys.executable, "-P", "-c", code]
    subprocess.run(command, env=environment(tmp_path), start_new_session=True, check=True, timeout=20)


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
