"""A chaos run's cluster on Ray: what `kvhive up` makes on machines that can be lost, and a second router.

Ray starts the workers again, the supervisor brings controller and first router back, and the next `kvhive up`
another supervisor. Redis and the second router are this run's own, as without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvhive.proto.errors import ClusterError
from kvhive.scripts.chaos_cluster import (
    CLUSTER,
    LEASE_S,
    MODEL,
    POOL_TOKENS,
    ClusterSize,
    RouterProcess,
    marked_environment,
)
from kvhive.scripts.chaos_ray_nodes import Node, RayNodes, command_of, kill, parent_of
from kvhive.scripts.chaos_ray_workers import BACK_WITHIN_S, ActorFleet, ActorWorker
from kvhive.scripts.chaos_redis import ChaosRedis, free_port
from kvhive.scripts.chaos_victims import Router
from kvhive.scripts.cluster_state import ClusterState, StateFolder
from kvhive.scripts.control_socket import ask
from kvhive.scripts.owned_processes import (
    ProcessId,
    end_processes,
    is_alive,
    processes_of,
    send_signal,
)
from kvhive.scripts.random_model import write_random_model
from kvhive.scripts.random_tokenizer import write_random_tokenizer
from kvhive.scripts.ray_driver import answers
from kvhive.scripts.ray_head import head_environment
from kvhive.scripts.router_process import READY_FILE, SPEC_FILE, RouterSpec

NODES = 3
_POLL_S = 0.2
_PARTS = {"supervisor": "supervisor", "control": "controller", "serve": "router"}
"""Module -> what state.json calls it."""


class SupervisedPart:
    """One of the single processes of the cluster's state; who brings it back is not asked here."""

    def __init__(self, folder: StateFolder, part: str, answers: Callable[[ClusterState], bool]) -> None:
        """`answers` says whether the part does what it is for."""
        self._folder = folder
        self._answers = answers
        self.name = part

    @property
    def process(self) -> ProcessId:
        """The one that it has, or had last."""
        process: ProcessId | None = getattr(self._folder.require(), self.name)
        assert process is not None, "it was not started"
        return process

    @property
    def pid(self) -> int:
        """Of that."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, frozen or not."""
        return is_alive(self.process)

    def signal(self, what: signal.Signals) -> None:
        """Send its process a signal, if it lives."""
        send_signal(self.process, what)

    def end(self) -> None:
        """Kill it."""
        process = self.process
        kill(lambda: [process] if is_alive(process) else [])

    def retire(self, within_s: float) -> None:
        """Ask it to end, and wait."""
        process = self.process
        end_processes(lambda: [process], within_s)

    def start(self) -> None:
        """Wait until it has been brought back. Raises ClusterError."""
        deadline = time.monotonic() + BACK_WITHIN_S
        while not (self.alive and self._answers(self._folder.require())):
            if time.monotonic() > deadline:
                raise ClusterError(f"the {self.name} is not back within {BACK_WITHIN_S:g} s")
            time.sleep(_POLL_S)


class FirstRouter(SupervisedPart):
    """The cluster's own router."""

    def __init__(self, folder: StateFolder, grpc: str, http: str) -> None:
        self.grpc = grpc
        """host:port."""
        self.http = http
        """Base URL."""
        super().__init__(folder, "router", lambda state: _listens(grpc) and _listens(http))


class RayCluster:
    """All of it. Built by `ray_cluster`."""

    def __init__(self, folder: Path, redis: ChaosRedis, nodes: RayNodes, size: ClusterSize) -> None:
        self.redis = redis
        self.nodes = nodes
        self._folder = folder
        self.wanted = size.workers
        """Workers."""
        self._state = StateFolder(folder / "state", CLUSTER)
        ports = [free_port() for _ in range(4)]
        doors = [f"127.0.0.1:{port}" for port in ports]
        self._up = self._options(ports)
        self.controller = SupervisedPart(self._state, "controller", _answers)
        self.supervisor = SupervisedPart(self._state, "supervisor", lambda state: True)
        self._first = FirstRouter(self._state, doors[0], f"http://{doors[1]}")
        self._second = RouterProcess(
            folder / "r2", lambda: self._second_spec(ports[2:]), doors[2], f"http://{doors[3]}"
        )
        self.workers: list[ActorWorker] = []

    @property
    def routers(self) -> list[Router]:
        """The cluster's own, and one more."""
        return [self._first, self._second]

    @property
    def fleet(self) -> ActorFleet:
        """Its workers, as seen from outside."""
        state = self._state.require()
        targets = [router.grpc for router in self.routers]
        return ActorFleet(Path(state.runtime_dir), state.cluster_token, targets, self.wanted)

    async def start(self) -> None:
        """Start machines and bring the cluster up. Raises ClusterError."""
        await asyncio.to_thread(self.nodes.start_head)
        for _ in range(NODES):
            await asyncio.to_thread(self.nodes.add)
        await asyncio.to_thread(self.up)
        await asyncio.to_thread(self._second.start)
        await asyncio.to_thread(self.refresh)

    async def end(self) -> None:
        """End what is the cluster's; the machines end with the context."""
        await asyncio.to_thread(self._second.end)
        state = self._state.load()
        if state is not None:  # `down` removes what its parts have said
            await asyncio.to_thread(_copy_logs, Path(state.runtime_dir), self._folder / "cluster")
        with contextlib.suppress(ClusterError):
            await asyncio.to_thread(self._kvhive, "down", "--cluster", CLUSTER, "--grace", "0", "--forget")

    def up(self) -> str:
        """`kvhive up`, the first time or again; returns what it said. Raises ClusterError."""
        session = self.nodes.session
        assert session is not None, "there is no head"
        return self._kvhive("up", "--address", session.address, *self._up)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Ask the controller. Raises ClusterError."""
        return ask(Path(self._state.require().runtime_dir), question)

    def refresh(self) -> dict[str, Any]:
        """Learn from the controller which workers serve; return all that it says. Raises ClusterError."""
        document, fleet = self.ask({"do": "fleet"}), self.fleet
        serving = [worker["id"] for worker in document["workers"] if worker["stage"] == "serving"]
        self.workers = [ActorWorker(fleet, worker_id) for worker_id in serving]
        return document

    def workers_on(self, node: Node) -> list[ActorWorker]:
        """Return those whose processes a node's manager has started."""
        raylet, processes = node.raylet(), self.fleet.processes()
        here = [
            worker_id
            for worker_id, each in processes.items()
            if raylet is not None and parent_of(each[-1].pid) == raylet.pid
        ]
        return [worker for worker in self.workers if worker.worker_id in here]

    async def look(self) -> list[str]:
        """Say what is wrong with its processes, and with what the controller says of them."""
        return await asyncio.to_thread(self._look)

    def _look(self) -> list[str]:
        document = self.refresh()
        wanted, workers = self.wanted, document["workers"]
        stages = {worker["id"]: worker["stage"] for worker in workers}
        problems = []
        if document["wanted"] != wanted or list(stages.values()) != ["serving"] * wanted:
            problems.append(f"{document['wanted']} workers are wanted, of {wanted}, and there are {stages}")
        if document["drains"]:
            problems.append(f"still draining: {document['drains']}")
        counts = {worker: len(processes) for worker, processes in self.fleet.processes().items()}
        if counts != dict.fromkeys(stages, 1):
            problems.append(f"processes of workers: {counts}")
        if len(self.nodes.nodes) != NODES or not all(node.raylet() for node in self.nodes.nodes):
            problems.append(f"nodes: {[node.name for node in self.nodes.nodes]}")
        return problems + self._parts_problems()

    def _parts_problems(self) -> list[str]:
        """Say which single parts there are not, or twice."""
        state = self._state.require()
        found: dict[str, list[int]] = {part: [] for part in _PARTS.values()}
        for process in processes_of(Path(state.runtime_dir)):
            command = command_of(process.pid)
            for module, part in _PARTS.items():
                if f"kvhive.scripts.{module}".encode() in command:
                    found[part].append(process.pid)
        named = {part: [getattr(state, part).pid] for part in found}
        return [] if found == named else [f"processes are {found}, and should be {named}"]

    def _kvhive(self, *arguments: str) -> str:
        session = self.nodes.session
        assert session is not None, "there is no head"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment.update(head_environment(session.auth_token), KVHIVE_STATE_DIR=str(self._folder / "state"))
        command = [sys.executable, "-P", "-m", "kvhive.scripts.cli", *arguments]
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )
        if done.returncode:
            raise ClusterError(f"kvhive {arguments[0]}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def _second_spec(self, ports: list[int]) -> RouterSpec:
        """Return what the first router is told, but for its doors."""
        spec = RouterSpec.load(Path(self._state.require().runtime_dir) / SPEC_FILE)
        router = {**spec.config["router"], "grpc_port": ports[0], "http_port": ports[1]}
        ready = str(self._folder / "r2" / READY_FILE)
        return replace(spec, config={**spec.config, "router": router}, ready_file=ready)

    def _options(self, ports: list[int]) -> list[str]:
        changes = {
            "model.path": self._folder / "model",
            "model.name": "random",
            "model.dtype": "float32",
            "workers.count": self.wanted,
            "workers.device": "cpu",
            "workers.threads": 1,
            "workers.pool_tokens": POOL_TOKENS,
            "redis.url": self.redis.url,
            "redis.lease_s": LEASE_S,
            "router.grpc_port": ports[0],
            "router.http_port": ports[1],
        }
        return ["--cluster", CLUSTER, *(f"--set={key}={value}" for key, value in changes.items())]


@contextlib.contextmanager
def ray_cluster(size: ClusterSize, logs: Path | None = None) -> Iterator[RayCluster]:
    """Make everything but start only Redis; what was started meanwhile is ended with the context.

    What all said is kept in `logs`, if given.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kvhive-", dir="/tmp"))  # short: Ray's sockets are in there
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if logs is not None:
            stack.callback(_copy_logs, folder, logs)
        stack.enter_context(marked_environment(folder))
        nodes = RayNodes(folder)
        stack.callback(nodes.end)
        redis = stack.enter_context(ChaosRedis(folder, "127.0.0.1", (), size.sentinel))
        model = write_random_model(folder / "model", MODEL)
        write_random_tokenizer(model, MODEL.vocabulary)
        yield RayCluster(folder, redis, nodes, size)


def _answers(state: ClusterState) -> bool:
    try:
        ask(Path(state.runtime_dir), {"do": "fleet"})
    except ClusterError:
        return False
    return True


def _listens(door: str) -> bool:
    return answers(door.removeprefix("http://"))


def _copy_logs(folder: Path, to: Path) -> None:
    """Copy what all parts have said, as far as that is still possible."""
    others = shutil.ignore_patterns("model", "*.json", "*.lock", "sockets", "control", "state")
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(folder, to, ignore=others, symlinks=True)
