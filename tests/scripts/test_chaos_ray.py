"""What a chaos run on Ray may strike, without a Ray; the run itself is done by hand (docs/chaos.md)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhive.proto.errors import ClusterError
from kvhive.scripts.chaos_awake import MOST_S, AwakeTime
from kvhive.scripts.chaos_ray_faults import NODE, RayFaults
from kvhive.scripts.chaos_ray_nodes import Node, command_of, is_raylet, parent_of
from kvhive.scripts.chaos_ray_workers import ActorFleet, ActorWorker
from kvhive.scripts.chaos_trouble import Trouble
from kvhive.scripts.chaos_work import Transcript, make_work
from kvhive.scripts.owned_processes import RUNTIME_DIR_VARIABLE
from kvhive.worker.actor import WORKER_VARIABLE


class StubCluster:
    """Three workers on two nodes, and a controller that says what it is told."""

    def __init__(self) -> None:
        self.workers = [SimpleNamespace(worker_id=f"w{number}") for number in (1, 2, 3)]
        self.routers: list[Any] = []
        self.redis = SimpleNamespace(watcher=None)
        self.controller = SimpleNamespace(name="controller")
        self.supervisor = SimpleNamespace(name="supervisor")
        self.nodes = SimpleNamespace(nodes=["the node"])
        self.on_node = self.workers[:2]
        self.answers: list[str] = []

    def workers_on(self, node: str) -> list[Any]:
        return self.on_node

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        said = self.answers.pop(0)
        if said:
            raise ClusterError(said)
        return {}


def faults(cluster: StubCluster, trouble: Trouble) -> RayFaults:
    return RayFaults(cluster, trouble, "t")  # type: ignore[arg-type]


def aimed(striker: RayFaults, name: str) -> bool:
    """Whether such a fault may be done now."""
    [kind] = [kind for kind in striker.kinds if kind.name == name]
    doing = kind.aim()
    if doing is not None:
        doing.close()
    return doing is not None


def test_a_node_is_lost_only_while_a_worker_elsewhere_is_whole_and_one_at_a_time() -> None:
    cluster, trouble = StubCluster(), Trouble()
    striker = faults(cluster, trouble)
    assert aimed(striker, "node_kill")
    with trouble.striking("worker_kill", "w3"):
        assert not aimed(striker, "node_kill")
    with trouble.striking("worker_kill", "w1"):
        assert aimed(striker, "node_kill")
    with trouble.striking("node_freeze", NODE):
        assert not aimed(striker, "node_kill") and not aimed(striker, "node_freeze")
    cluster.on_node = cluster.workers
    assert not aimed(striker, "node_kill")


def test_single_parts_have_one_trouble_at_a_time_and_a_worker_is_always_left() -> None:
    trouble = Trouble()
    striker = faults(StubCluster(), trouble)
    with trouble.striking("controller_freeze", "controller"):
        assert not aimed(striker, "controller_kill") and aimed(striker, "supervisor_kill")
    with trouble.striking("worker_kill", "w1", "w2"):
        assert not aimed(striker, "worker_drain") and not aimed(striker, "worker_kill")
    assert aimed(striker, "worker_drain")
    assert "worker_restart" not in [kind.name for kind in striker.kinds], "an actor is drained"


async def test_an_order_is_given_until_the_controller_has_heard_it() -> None:
    cluster = StubCluster()
    cluster.answers = ["the controller does not answer (refused)", "", "not asked"]
    await asyncio.to_thread(faults(cluster, Trouble())._insist, {"do": "scale", "workers": 3})
    assert cluster.answers == ["not asked"]
    cluster.answers = ["worker w1 is being drained already", "not asked"]
    await asyncio.to_thread(faults(cluster, Trouble())._insist, {"do": "drain"})
    assert cluster.answers == ["not asked"]


@pytest.fixture
def actors(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes of a worker w7, as far as their environment says."""
    marks = {RUNTIME_DIR_VARIABLE: str(tmp_path), WORKER_VARIABLE: "w7"}
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = [
        subprocess.Popen(command, env={**os.environ, **marks}, start_new_session=True, **pipes)
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()  # it is itself by now, with the environment that it was given
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_a_worker_is_its_newest_process_and_one_too_many_is_seen(
    tmp_path: Path, actors: list[subprocess.Popen[bytes]]
) -> None:
    fleet = ActorFleet(tmp_path, "token", [], wanted=1)
    assert {process.pid for process in fleet.processes()["w7"]} == {process.pid for process in actors}
    worker = ActorWorker(fleet, "w7")
    first = worker.pid
    assert parent_of(first) == os.getpid() and not is_raylet(first) and b"-c" in command_of(first)
    worker.end()
    assert worker.alive and worker.pid != first
    worker.end()
    assert not worker.alive and fleet.processes() == {}
    with pytest.raises(ProcessLookupError, match="w7"):
        _ = worker.pid


def test_a_node_is_its_session(actors: list[subprocess.Popen[bytes]]) -> None:
    node = Node("node1", "127.0.1.11", actors[0])
    assert [process.pid for process in node.processes()] == [actors[0].pid]
    assert node.raylet() is None
    node.lose()
    assert node.processes() == [] and actors[1].poll() is None


def test_silence_does_not_count_while_the_machine_has_no_time_for_us() -> None:
    awake = AwakeTime()
    seen = Transcript(make_work("t", 1, 512, 1024)[0], awake)
    awake.passed(0.25)
    awake.passed(30.0)
    assert seen.silent_s == 0.25 + MOST_S and awake.lost_s == 30.0 - MOST_S
