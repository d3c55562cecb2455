"""What ends is started again, where it was; what keeps ending, less and less often."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvhive.proto.errors import ClusterError
from kvhive.scripts.cluster_state import ClusterState, RaySession, StateFolder
from kvhive.scripts.embedded_redis import EmbeddedRedis, relaunch
from kvhive.scripts.owned_processes import ProcessId, identify
from kvhive.scripts.router_process import RouterSpec, keep_ports
from kvhive.scripts.supervisor import (
    MOST_UNNAMED,
    PAUSE_FIRST_S,
    PAUSE_LONGEST_S,
    STABLE_S,
    Part,
    supervise,
    supervise_once,
)

ME = identify(os.getpid())
GONE = ProcessId(2**22 + 1, 1)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    found = StateFolder(tmp_path / "state", "default")
    found.save(
        ClusterState(
            "default", str(tmp_path), "t", ready=True, ray=RaySession("127.0.0.1:1"), supervisor=ME, router=ME
        )
    )
    return found


def part(name: str, launches: list[float], now: Callable[[], float], becomes: ProcessId | None = ME) -> Part:
    def launch(state: ClusterState) -> ProcessId | None:
        launches.append(now())
        return becomes

    return Part(name, launch)


def test_a_part_that_ended_is_started_again_and_written_down(folder: StateFolder) -> None:
    clock, launches = [100.0], list[float]()
    parts = [part("router", launches, lambda: clock[0])]
    assert supervise_once(folder, parts, ME, clock[0]) and not launches, "it runs"
    folder.save(replace(folder.require(), router=GONE))
    for _ in range(20):
        assert supervise_once(folder, parts, ME, clock[0])
        clock[0] += 0.1
    assert launches == [pytest.approx(100.0 + PAUSE_FIRST_S, abs=0.15)]
    state = folder.require()
    assert state.router == ME and state.restarts == {"router": 1}


def test_what_keeps_ending_is_started_less_and_less_often_until_it_has_been_stable(
    folder: StateFolder,
) -> None:
    clock, launches = [0.0], list[float]()
    parts = [part("router", launches, lambda: clock[0], becomes=GONE)]
    folder.save(replace(folder.require(), router=GONE))
    while len(launches) < 9:
        supervise_once(folder, parts, ME, clock[0])
        clock[0] += 0.1
    pauses = [after - before for before, after in itertools.pairwise(launches)]
    assert pauses[:3] == pytest.approx([1.0, 2.0, 4.0], abs=0.35)
    assert max(pauses) < PAUSE_LONGEST_S + 0.5
    folder.save(replace(folder.require(), router=ME))
    clock[0] += STABLE_S + 1
    supervise_once(folder, parts, ME, clock[0])
    assert parts[0].pause_s == PAUSE_FIRST_S


def test_a_cluster_of_another_supervisor_and_one_that_is_gone_are_left_alone(folder: StateFolder) -> None:
    launches: list[float] = []
    parts = [part("router", launches, lambda: 0.0)]
    folder.save(replace(folder.require(), router=GONE, supervisor=GONE))
    assert not supervise_once(folder, parts, ME, 0.0) and not supervise_once(folder, parts, ME, 99.0)
    folder.save(replace(folder.require(), ready=False))
    assert supervise_once(folder, parts, ME, 0.0), "a start under way may name it yet"
    folder.remove()
    assert not supervise_once(folder, parts, ME, 0.0)
    assert not launches


def test_a_supervisor_that_stood_still_goes_on_and_one_that_is_not_named_any_more_leaves(
    folder: StateFolder,
) -> None:
    """A machine may have no time for it for a minute: nobody else brings the parts back."""
    clock, launches = [0.0], list[float]()
    parts = [part("router", launches, lambda: clock[0])]

    def sleep(seconds: float) -> None:
        clock[0] += 60.0
        if clock[0] == 120.0:
            folder.save(replace(folder.require(), router=GONE))
        elif clock[0] == 600.0:
            folder.save(replace(folder.require(), supervisor=GONE))

    supervise(folder, parts, ME, lambda: clock[0], sleep)
    assert launches == [180.0]
    assert clock[0] == 600.0 + 60.0 * MOST_UNNAMED


def test_a_part_that_cannot_be_started_holds_up_no_other(folder: StateFolder) -> None:
    def cannot(state: ClusterState) -> ProcessId | None:
        raise ClusterError("no binary")

    launches: list[float] = []
    parts = [Part("controller", cannot), part("router", launches, lambda: 0.0)]
    folder.save(replace(folder.require(), router=GONE))
    for now in (1.0, 2.0, 3.0):
        assert supervise_once(folder, parts, ME, now)
    assert launches and folder.require().restarts == {"router": 1}


def test_what_cannot_be_written_down_is_not_started_twice(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[float] = []
    parts = [part("router", launches, lambda: 0.0)]
    folder.save(replace(folder.require(), router=GONE))

    def full(state: ClusterState) -> ClusterState:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(folder, "save", full)
        for now in (1.0, 2.0, 3.0, 4.0):
            assert supervise_once(folder, parts, ME, now)
    assert len(launches) == 1 and folder.require().router == GONE
    assert supervise_once(folder, parts, ME, 5.0)
    state = folder.require()
    assert (state.router, state.restarts, launches) == (ME, {"router": 1}, launches[:1])


def test_a_full_disk_leaves_the_router_s_spec_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "router.json"
    config = {"router": {"grpc_port": 0, "http_port": 0}}
    RouterSpec(config, "", "", "m", "m", "", 1, 1, "").save(path)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvhive.scripts.router_process.json.dump", full)
    with pytest.raises(OSError, match="No space left"):
        keep_ports(tmp_path, "127.0.0.1:4711", "http://127.0.0.1:4712")
    assert RouterSpec.load(path).config == config
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_operator_s_redis_is_not_ours_to_start(folder: StateFolder) -> None:
    launches: list[float] = []
    for now in (1.0, 2.0, 3.0):
        assert supervise_once(folder, [part("redis", launches, lambda: 0.0)], ME, now)
    assert not launches


def test_a_redis_comes_back_with_its_port_and_password(tmp_path: Path) -> None:
    import redis

    with EmbeddedRedis(tmp_path / "redis") as server, redis.Redis.from_url(server.url) as client:
        client.set("a", "b")
        os.kill(server.pid, 9)
        process = relaunch(tmp_path / "redis")
        try:
            deadline = time.monotonic() + 20.0
            while True:
                try:
                    assert client.get("a") is None
                    break
                except redis.RedisError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
        finally:
            process.terminate()
            process.wait(10)
    with pytest.raises(ClusterError, match=r"redis\.conf is gone"):
        relaunch(tmp_path / "nowhere")


def test_the_next_router_gets_the_ports_that_clients_know(tmp_path: Path) -> None:
    config = {"router": {"grpc_port": 0, "http_port": 0, "host": "127.0.0.1"}}
    RouterSpec(config, "", "", "m", "m", "", 1, 1, str(tmp_path / "ready.json")).save(
        tmp_path / "router.json"
    )
    keep_ports(tmp_path, "127.0.0.1:4711", "http://[::1]:4712/")
    router = RouterSpec.load(tmp_path / "router.json").config["router"]
    assert (router["grpc_port"], router["http_port"], router["host"]) == (4711, 4712, "127.0.0.1")


def test_a_supervisor_that_no_state_names_leaves_by_itself(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvhive.scripts.supervisor", str(tmp_path), "nobody"],
        stderr=subprocess.PIPE,
    )
    said = process.communicate(timeout=60)[1]
    assert b"leaving: no state" in said and said.count(b"\n") == 1 and process.returncode == 0
