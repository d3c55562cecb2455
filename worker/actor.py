"""The Ray actor around one WorkerServer. The only file of this room that knows Ray.

The actor is detached, named, and restarted by Ray for ever. Its constructor starts the server on a thread
and returns, so that a restart after a kill loads and serves again with no driver anywhere, and so that
`status` answers while a model loads. The server registers under a new epoch each time by itself; when it is
started, tried again and stopped is server_life.py.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any, TypedDict

import ray
import ray.util

from kvhive.worker.options import WorkerOptions
from kvhive.worker.server import WorkerServer
from kvhive.worker.server_life import Phase, ServerLife

NAMESPACE = "kvhive"
NODE_HOST = "node"
"""As `WorkerOptions.host`: bind the node's own IP, which only the actor can know."""
CONCURRENT_CALLS = 4
"""`status` must answer while `stop` waits for streams to end."""
_LOG_FORMAT = "time=%(asctime)s level=%(levelname)s at=%(name)s %(message)s"


class ActorStatus(TypedDict):
    """What an actor says of itself, in plain values."""

    phase: Phase
    detail: str
    """What is being done, or why it failed."""
    address: str
    epoch: int
    pid: int


class WorkerActor:
    """One worker in its own process."""

    def __init__(self, options: WorkerOptions) -> None:
        # force: Ray may have put handlers of its own on the root logger. The lines end in Ray's worker logs.
        logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT, force=True)
        if options.host == NODE_HOST:
            options = dataclasses.replace(options, host=ray.util.get_node_ip_address())
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._life = ServerLife(lambda: WorkerServer(options, on_failure=_give_up), restarted)
        threading.Thread(target=self._life.run, name="start", daemon=True).start()

    def status(self) -> ActorStatus:
        """Say how far this worker is; answers at once."""
        life = self._life
        return ActorStatus(
            phase=life.phase,
            detail=life.failure or life.server.progress(),
            address=life.server.address,
            epoch=life.server.epoch,
            pid=os.getpid(),
        )

    def stop(self, grace_s: float) -> None:
        """Refuse new requests, give running ones `grace_s` seconds, deregister. The process stays."""
        self._life.stop(grace_s)


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
        "THP_MEM_ALLOC_ENABLE": "1",  # torch: weights and pool in huge pages, which read faster
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
