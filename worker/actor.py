"""The Ray actor around one WorkerServer. The only file of this room that knows Ray.

The actor is detached, named, and restarted by Ray for ever. Its constructor starts the server on a thread
and returns, so that a restart after a kill loads and serves again with no driver anywhere, and so that
`status` answers while a model loads. The server registers under a new epoch each time by itself.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import ray
import ray.util

from kvhive.worker.options import WorkerOptions
from kvhive.worker.server import WorkerServer

log = logging.getLogger(__name__)

NAMESPACE = "kvhive"
NODE_HOST = "node"
"""As `WorkerOptions.host`: bind the node's own IP, which only the actor can know."""
CONCURRENT_CALLS = 4
"""`status` must answer while `stop` waits for streams to end."""
_RETRY_FIRST_S = 1.0
_RETRY_LONGEST_S = 30.0


class ActorStatus(TypedDict):
    """What an actor says of itself, in plain values."""

    phase: Literal["starting", "serving", "failed", "stopped"]
    detail: str
    """What is being done, or why it failed."""
    address: str
    epoch: int
    pid: int


class WorkerActor:
    """One worker in its own process."""

    def __init__(self, options: WorkerOptions) -> None:
        if options.host == NODE_HOST:
            options = dataclasses.replace(options, host=ray.util.get_node_ip_address())
        self._options = options
        self._restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._stopping = threading.Event()
        self._failure = ""
        self._serving = False
        self._server = WorkerServer(options, on_failure=_give_up)
        threading.Thread(target=self._serve, name="start", daemon=True).start()

    def status(self) -> ActorStatus:
        """Say how far this worker is; answers at once."""
        phase: Literal["starting", "serving", "failed", "stopped"] = "starting"
        if self._stopping.is_set():
            phase = "stopped"
        elif self._serving:
            phase = "serving"
        elif self._failure:
            phase = "failed"
        return ActorStatus(
            phase=phase,
            detail=self._failure or self._server.progress(),
            address=self._server.address,
            epoch=self._server.epoch,
            pid=os.getpid(),
        )

    def stop(self, grace_s: float) -> None:
        """Refuse new requests, give running ones `grace_s` seconds, deregister. The process stays."""
        self._stopping.set()
        if self._serving:
            self._server.stop(grace_s)

    def _serve(self) -> None:
        """Start the server. The first start fails for good, so that somebody reads why; a restart retries.

        A restarted worker has served before: what stops it now (Redis away, memory short) may pass.
        """
        wait_s = _RETRY_FIRST_S
        while not self._stopping.is_set():
            try:
                self._server.start()
            except Exception as error:  # the process's outermost edge: logged, and shown by `status`
                log.exception("worker=%s cannot start", self._options.worker_id)
                self._failure = f"{type(error).__name__}: {error}"
            else:
                self._failure, self._serving = "", True
                return
            if not self._restarted:
                return
            self._stopping.wait(wait_s)
            wait_s = min(2 * wait_s, _RETRY_LONGEST_S)
            self._server = WorkerServer(self._options, on_failure=_give_up)


@dataclass(frozen=True, slots=True)
class Placement:
    """What Ray reserves for a worker, and the environment that its process starts with."""

    num_cpus: float
    num_gpus: int
    environment: dict[str, str]


def actor_name(cluster: str, worker_id: str) -> str:
    """Return the name under which a worker's actor is found, in the namespace NAMESPACE."""
    return f"kvhive-{cluster}-{worker_id}"


def create_worker(options: WorkerOptions, placement: Placement) -> Any:
    """Create a worker's detached actor and return its handle at once, placed or not.

    Raises ValueError when an actor of that name exists.
    """
    threads = str(options.threads)
    # Threads that spin at barriers are what makes two workers on one machine slow each other down.
    threading_environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
    }
    actor = ray.remote(WorkerActor).options(
        name=actor_name(options.cluster, options.worker_id),
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=CONCURRENT_CALLS,
        num_cpus=placement.num_cpus,
        num_gpus=placement.num_gpus,
        runtime_env={"env_vars": {**threading_environment, **placement.environment}},
    )
    return actor.remote(options)


def find_worker(cluster: str, worker_id: str) -> Any | None:
    """Return the handle of a worker's actor; None when there is none."""
    try:
        return ray.get_actor(actor_name(cluster, worker_id), namespace=NAMESPACE)
    except ValueError:
        return None


def _give_up() -> None:
    """End the process after the engine failed, so that Ray starts a fresh one under a new epoch."""
    os._exit(1)
