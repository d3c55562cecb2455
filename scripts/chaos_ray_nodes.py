"""The machines of a chaos run on Ray: a head that runs no worker, and nodes that can be lost.

All are this machine, each under a loopback address of its own (127.0.1.N), as in loopback_nodes.py, but
without an autoscaler: another one comes when the run says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvhive.proto.errors import ClusterError
from kvhive.scripts.cluster_state import RaySession
from kvhive.scripts.log_tail import last_line
from kvhive.scripts.loopback_nodes import STARTED_MARK, agent_ports
from kvhive.scripts.owned_processes import ProcessId, end_processes, identify, processes_of, send_signal
from kvhive.scripts.ray_head import head_environment, start_head

SLOTS = 2
"""Workers that a node has room for: when one node is lost, another one may take its worker at once."""
_FIRST_HOST = 11
"""127.0.1.11 and on: the lower ones are the head's and the autoscaler's."""
_START_TIMEOUT_S = 180.0
_ATTEMPTS = 3
_KILL_WAIT_S = 5.0
"""Only the kernel is left to wait for."""
_OBJECT_STORE_BYTES = 80_000_000


@dataclass(slots=True)
class Node:
    """One machine."""

    name: str
    address: str
    process: subprocess.Popen[bytes]
    """`ray start`, which ends when its raylet does."""

    def raylet(self) -> ProcessId | None:
        """Return Ray's manager of the node, which everything else on it depends on."""
        for process in self.processes():
            if is_raylet(process.pid):
                return process
        return None

    def processes(self) -> list[ProcessId]:
        """Return all that runs on it: its session."""
        return _session_of(self.process.pid)

    def signal_raylet(self, what: signal.Signals) -> None:
        """Send its manager a signal, if there is one."""
        raylet = self.raylet()
        if raylet is not None:
            send_signal(raylet, what)

    def lose(self) -> None:
        """End all of it at once, as a machine that loses its power."""
        kill(self.processes)
        self.process.wait()

    def lose_raylet(self) -> None:
        """Kill its manager alone: the rest has to see that, and to end."""
        self.signal_raylet(signal.SIGKILL)


class RayNodes:
    """The head and its nodes. Calls block; a context manager that ends what it has started."""

    def __init__(self, folder: Path) -> None:
        """Prepare. All that runs on a node is known by `folder`, the runtime directory of this process."""
        self._folder = folder
        self._one_start = threading.Lock()
        self._started = 0
        self._nodes: list[Node] = []
        self.session: RaySession | None = None

    def start_head(self) -> RaySession:
        """Start the head. Raises ClusterError."""
        self.session = start_head(self._folder, num_cpus=0, use_gpus=False, started=lambda session: None)
        return self.session

    @property
    def nodes(self) -> list[Node]:
        """Those that run."""
        return [node for node in self._nodes if node.process.poll() is None]

    def add(self) -> Node:
        """Start another node, one at a time: two at once fight over a socket's name. Raises ClusterError."""
        with self._one_start:
            for _ in range(_ATTEMPTS):
                self._started += 1
                node = self._launch(self._started)
                if self._begun(node):
                    self._nodes = [*self.nodes, node]
                    return node
                node.lose()
        raise ClusterError(f"no node after {_ATTEMPTS} tries: {last_line(self._log(node.name))}")

    def end(self) -> None:
        """End all of it."""
        for node in self._nodes:
            node.lose()
        head = self.session.head if self.session else None
        if head is not None:  # by its session: Ray's agents overwrite the environment that names a folder
            kill(lambda: _session_of(head.pid))
        end_processes(lambda: processes_of(self._folder), 0.0)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _launch(self, number: int) -> Node:
        assert self.session is not None, "there is no head"
        name, address = f"node{number}", f"127.0.1.{_FIRST_HOST + number % 200}"
        command = [
            str(Path(sys.executable).parent / "ray"),
            *("start", "--block", "--disable-usage-stats", f"--address={self.session.address}"),
            *(f"--node-ip-address={address}", f"--num-cpus={SLOTS}", "--num-gpus=0"),
            *(f"--object-store-memory={_OBJECT_STORE_BYTES}", *agent_ports(address)),
        ]
        environment = {
            **os.environ,
            **head_environment(self.session.auth_token),
            "RAY_agent_register_timeout_ms": "90000",
        }
        with self._log(name).open("wb") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Node(name, address, process)

    def _begun(self, node: Node) -> bool:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while node.process.poll() is None and time.monotonic() < deadline:
            if STARTED_MARK in self._log(node.name).read_text(errors="replace"):
                return True
            time.sleep(0.1)
        return False


def kill(processes: Callable[[], list[ProcessId]]) -> None:
    """Kill processes, without the SIGTERM by which an actor ends for good; asks again until none is left."""
    deadline = time.monotonic() + _KILL_WAIT_S
    while (left := processes()) and time.monotonic() < deadline:
        for process in left:
            send_signal(process, signal.SIGKILL)
        time.sleep(0.01)


def is_raylet(pid: int) -> bool:
    """Whether a process is Ray's manager of a node."""
    return command_of(pid)[0].endswith(b"/raylet")


def parent_of(pid: int) -> int:
    """Return who has started a process, and still runs; 0 when it has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def command_of(pid: int) -> list[bytes]:
    """Return a process' command line, of at least one word; that is empty when it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def _session_of(leader: int) -> list[ProcessId]:
    """Return the processes of a session."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [process for pid in pids if _session(pid) == leader and (process := identify(pid))]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0
