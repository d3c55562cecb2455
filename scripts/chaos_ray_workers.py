"""Workers as actors under Ray, seen from outside: their processes, and when they are back.

Nothing here asks Ray or the controller, which are struck too: processes are found by what their environment
says, and whether they serve is for the routers to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from kvhive.proto.errors import ClusterError
from kvhive.proto.transport import CLUSTER_TOKEN_KEY
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvhive.scripts.chaos_ray_nodes import kill
from kvhive.scripts.owned_processes import ProcessId, is_alive, processes_of, send_signal
from kvhive.worker.actor import WORKER_VARIABLE

BACK_WITHIN_S = 150.0
"""For Ray to start a process and that process to serve, while all else is struck too on a busy machine."""
_ASK_S = 2.0
_STATUS_S = 10.0
_POLL_S = 0.3
_OPTIONS = [("grpc.enable_http_proxy", 0)]


class ActorFleet:
    """All workers of one cluster, by name."""

    def __init__(self, runtime_dir: Path, token: str, routers: Sequence[str], wanted: int) -> None:
        """`routers` are the host:port of those who know the workers; there are to be `wanted`."""
        self._runtime_dir = runtime_dir
        self.token = token
        self._routers = routers
        self._wanted = wanted

    def processes(self) -> dict[str, list[ProcessId]]:
        """Return the processes of each worker, the oldest first."""
        found = dict[str, list[ProcessId]]()
        for process in sorted(processes_of(self._runtime_dir), key=lambda each: each.started):
            worker_id = _worker_of(process.pid)
            if worker_id:
                found.setdefault(worker_id, []).append(process)
        return found

    def serving(self) -> dict[str, pb.WorkerInfo]:
        """Return the workers that a router knows to serve and whose processes live."""
        processes = self.processes()
        for target in self._routers:
            with contextlib.suppress(grpc.RpcError):
                return {
                    info.id: info
                    for info in _ask(target).workers
                    if info.state == "serving"
                    and info.pid in [process.pid for process in processes.get(info.id, ())]
                }
        return {}

    def wait(self, reached: Callable[[dict[str, pb.WorkerInfo]], bool], what: str) -> None:
        """Wait until something holds of those that serve. Raises ClusterError after BACK_WITHIN_S."""
        deadline = time.monotonic() + BACK_WITHIN_S
        while not reached(serving := self.serving()):
            if time.monotonic() > deadline:
                raise ClusterError(f"not within {BACK_WITHIN_S:g} s: {what}; there are {sorted(serving)}")
            time.sleep(_POLL_S)

    def wait_whole(self, without: str = "") -> None:
        """Wait until as many serve as there are to be, one of them not among them. Raises ClusterError."""

        def whole(serving: dict[str, pb.WorkerInfo]) -> bool:
            return len(serving) == self._wanted and without not in serving

        self.wait(whole, f"{self._wanted} workers serve, and {without or 'nobody'} is gone")

    def wait_back(self, worker_id: str) -> None:
        """Wait until a worker serves again, or others in its place. Raises ClusterError."""
        self.wait(
            lambda serving: worker_id in serving or len(serving) == self._wanted, f"{worker_id} is back"
        )


class ActorWorker:
    """One worker id. Ray starts its process again whenever that ends."""

    def __init__(self, fleet: ActorFleet, worker_id: str) -> None:
        self._fleet = fleet
        self.worker_id = worker_id

    @property
    def process(self) -> ProcessId | None:
        """Its newest process."""
        return self._fleet.processes().get(self.worker_id, [None])[-1]

    @property
    def pid(self) -> int:
        """Of that. Raises ProcessLookupError."""
        process = self.process
        if process is None:
            raise ProcessLookupError(f"worker {self.worker_id} has no process")
        return process.pid

    @property
    def alive(self) -> bool:
        """Whether there is one."""
        return self.process is not None

    def signal(self, what: signal.Signals) -> None:
        """Send its process a signal, if there is one."""
        process = self.process
        if process is not None:
            send_signal(process, what)

    def end(self) -> None:
        """Kill its process, and see it end."""
        process = self.process
        kill(lambda: [process] if is_alive(process) and process else [])

    def retire(self, within_s: float) -> None:
        """Tell its process to end: for Ray it has then ended for good, and the controller makes another."""
        self.signal(signal.SIGTERM)
        time.sleep(min(1.0, within_s))
        self.end()

    def start(self) -> None:
        """Wait until Ray has brought it back. Raises ClusterError."""
        self._fleet.wait_back(self.worker_id)

    async def status(self, audit: bool = False) -> worker_pb2.GetStatusResponse:
        """Return its accounting. Raises AioRpcError, or ClusterError when no router knows it."""
        info = (await asyncio.to_thread(self._fleet.serving)).get(self.worker_id)
        if info is None:
            raise ClusterError(f"worker {self.worker_id} does not serve")
        async with grpc.aio.insecure_channel(info.address, options=_OPTIONS) as channel:
            answer: worker_pb2.GetStatusResponse = await worker_pb2_grpc.WorkerStub(channel).GetStatus(
                worker_pb2.GetStatusRequest(audit=audit),
                metadata=((CLUSTER_TOKEN_KEY, self._fleet.token),),
                timeout=_STATUS_S,
            )
            return answer


def _ask(target: str) -> pb.GetClusterResponse:
    with grpc.insecure_channel(target, options=_OPTIONS) as channel:
        answer: pb.GetClusterResponse = inference_pb2_grpc.InferenceStub(channel).GetCluster(
            pb.GetClusterRequest(), timeout=_ASK_S
        )
        return answer


def _worker_of(pid: int) -> str:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    mark = os.fsencode(WORKER_VARIABLE) + b"="
    return next((os.fsdecode(each.removeprefix(mark)) for each in entries if each.startswith(mark)), "")
