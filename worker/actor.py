"""The Ray actors of a worker: one around its WorkerServer, one for each other rank. Only this file knows Ray.

The actor is detached, named, and restarted by Ray for ever. Its constructor starts the server on a thread
and returns, so that a restart after a kill loads and serves again with no driver anywhere, and so that
`status` answers while a model loads. The server registers under a new epoch each time by itself; when it is
started, tried again and stopped is server_life.py.

Where ranks share a model, the worker has a placement group on one machine, and its actor, which is rank 0,
makes the others in it. Ray ends them with it, however it ends; it ends when one of them does.

Who makes actors, asks them and ends them needs no torch, whose import takes seconds: actors do it themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import ray
import ray.exceptions
import ray.util
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvhive.proto.errors import Unavailable
from kvhive.worker.options import WorkerOptions

if TYPE_CHECKING:  # what brings torch
    from kvhive.worker.rank_group import Meeting
    from kvhive.worker.server import WorkerServer
    from kvhive.worker.server_life import Phase

NAMESPACE = "kvhive"
NODE_HOST = "node"
"""As `WorkerOptions.host`: bind the node's own IP, which only the actor can know."""
WORKER_VARIABLE = "KVHIVE_WORKER"
"""Tells, in the environment of each process of a worker, whose it is: for `ps e`."""
BEGIN_TIMEOUT_S = 300.0
"""How long Ray may take to start the processes of the other ranks, once it has placed the first."""
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
    node: str
    """The Ray node it runs on."""


class WorkerActor:
    """One worker in its own process."""

    def __init__(self, options: WorkerOptions) -> None:
        from kvhive.worker.server import WorkerServer
        from kvhive.worker.server_life import ServerLife

        _log_to_ray()
        if options.host == NODE_HOST:
            options = dataclasses.replace(options, host=ray.util.get_node_ip_address())
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        place = ray.util.get_current_placement_group()

        def make_server() -> WorkerServer:
            ranks = RankActors(options, place) if options.tensor_parallel > 1 else None
            return WorkerServer(options, _give_up, ranks)

        self._life = ServerLife(make_server, restarted)
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
            node=ray.get_runtime_context().get_node_id(),
        )

    def stop(self, grace_s: float) -> None:
        """Refuse new requests, give running ones `grace_s` seconds, deregister. The process stays."""
        self._life.stop(grace_s)


class RankActor:
    """One of the other ranks of a worker, in its own process."""

    def __init__(self, options: WorkerOptions, rank: int) -> None:
        from kvhive.worker.rank_follower import follow

        _log_to_ray()
        self._follow = partial(follow, options, rank=rank)

    def begun(self) -> None:
        """Answer when the process is there and has imported what it needs."""

    def follow(self, meeting: Meeting) -> None:
        """Compute what rank 0 tells until it ends; raises what rank_follower.follow does."""
        self._follow(meeting)


class RankActors:
    """Implements RankProcesses: actors in the placement group of rank 0's, which owns them."""

    def __init__(self, options: WorkerOptions, place: Any) -> None:
        self._options, self._place = options, place
        self._actors: list[Any] = []
        self._stopped = False

    def start(self, meeting: Meeting, lost: Callable[[str], None]) -> None:
        """Create the actors, wait for them and let them follow."""
        for rank in range(1, meeting.ranks):
            # They start with this actor's environment.
            actor = (
                ray.remote(RankActor)
                .options(max_restarts=0, **_bundle(self._place, rank))
                .remote(self._options, rank)
            )
            self._actors.append(actor)
        try:
            ray.get([actor.begun.remote() for actor in self._actors], timeout=BEGIN_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise Unavailable(f"a rank cannot begin: {_last_line(error)}") from error
        following = {actor.follow.remote(meeting): rank for rank, actor in enumerate(self._actors, start=1)}
        threading.Thread(target=self._watch, args=(following, lost), name="rank actors", daemon=True).start()

    def stop(self) -> None:
        """Kill the actors."""
        self._stopped = True
        for actor in self._actors:
            ray.kill(actor)

    def _watch(self, following: dict[Any, int], lost: Callable[[str], None]) -> None:
        (ended, *_), _ = ray.wait(list(following), num_returns=1)
        reason = "ended by itself"
        try:
            ray.get(ended)
        except ray.exceptions.RayError as error:
            reason = _last_line(error)
        if not self._stopped:
            lost(f"rank {following[ended]}: {reason}")


@dataclass(frozen=True, slots=True)
class Placement:
    """What Ray reserves for each rank of a worker, and the environment that its process starts with."""

    num_cpus: float
    num_gpus: float
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
        WORKER_VARIABLE: options.worker_id,
    }
    name = actor_name(options.cluster, options.worker_id)
    place: dict[str, Any] = {"num_cpus": placement.num_cpus, "num_gpus": placement.num_gpus}
    if options.tensor_parallel > 1:
        place = _bundle(_make_place(name, options.tensor_parallel, placement), 0)
    actor = ray.remote(WorkerActor).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=CONCURRENT_CALLS,
        **place,
        runtime_env={"env_vars": {**threading_environment, **placement.environment}},
    )
    return actor.remote(options)


def list_workers(cluster: str) -> list[str]:
    """Return the ids of a cluster's workers that have an actor, placed or not."""
    prefix = actor_name(cluster, "")
    found = [entry["name"] for entry in ray.util.list_named_actors(True) if entry["namespace"] == NAMESPACE]
    ids = [name.removeprefix(prefix) for name in found if name.startswith(prefix)]
    return sorted(each for each in ids if "-" not in each)  # with a dash it is of cluster `<cluster>-...`


def find_worker(cluster: str, worker_id: str) -> Any | None:
    """Return the handle of a worker's actor; None when there is none."""
    try:
        return ray.get_actor(actor_name(cluster, worker_id), namespace=NAMESPACE)
    except ValueError:
        return None


def give_place_back(cluster: str, worker_id: str) -> None:
    """Remove the placement group of a worker whose actor is gone, if it had one."""
    with contextlib.suppress(ValueError):
        remove_placement_group(ray.util.get_placement_group(actor_name(cluster, worker_id)))


def _make_place(name: str, ranks: int, placement: Placement) -> Any:
    """Reserve one bundle a rank, all on one machine; returns at once, reserved or not."""
    bundle = {"CPU": placement.num_cpus, "GPU": placement.num_gpus}
    bundle = {resource: amount for resource, amount in bundle.items() if amount}
    return ray.util.placement_group([bundle] * ranks, "STRICT_PACK", name=name, lifetime="detached")


def _bundle(place: Any, rank: int) -> dict[str, Any]:
    """Return the options of an actor that takes all of one bundle."""
    resources = place.bundle_specs[rank]
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(place, rank),
    }


def _last_line(error: Exception) -> str:
    """Return what an error of Ray's comes to, after the stack that it shows."""
    return str(error).strip().splitlines()[-1]


def _log_to_ray() -> None:
    # force: Ray may have put handlers of its own on the root logger. The lines end in Ray's worker logs.
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT, force=True)


def _give_up() -> None:
    """End the process after the engine failed, so that Ray starts a fresh one under a new epoch."""
    os._exit(1)
