"""The workers of one cluster, as Ray actors: started, watched until they serve, and stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from kvhive.proto.config import ClusterConfig
from kvhive.proto.errors import ClusterError
from kvhive.worker.actor import ActorStatus, Placement, create_worker, find_worker, give_place_back
from kvhive.worker.options import WorkerOptions

_POLL_S = 0.3
_ASK_S = 2.0


def worker_ids(count: int) -> tuple[str, ...]:
    """Return the ids of a cluster's first workers."""
    return tuple(f"w{number}" for number in range(1, count + 1))


def choose_device(config: ClusterConfig, may_grow: bool) -> str:
    """Resolve `workers.device: auto` by what Ray has. Raises ClusterError when GPUs are too few.

    A cluster that `may_grow` is waited for when `cuda` was asked for: Ray's autoscaler may bring GPUs.
    """
    workers = config.workers
    ranks = workers.count * workers.tensor_parallel
    gpus = int(ray.cluster_resources().get("GPU", 0))
    device = workers.device if workers.device != "auto" else ("cuda" if gpus else "cpu")
    awaited = may_grow and workers.device == "cuda"
    if device != "cuda" or awaited:
        return device
    if gpus < ranks and workers.tensor_parallel == 1:
        raise ClusterError(
            f"workers.count is {workers.count} but Ray has {gpus} GPU(s), and each worker owns one: "
            f"set workers.count: {gpus}, or workers.device: cpu"
        )
    by_machine = gpus_by_machine()
    room = sum(count // workers.tensor_parallel for count in by_machine)
    if room < workers.count:
        raise ClusterError(
            f"workers.tensor_parallel is {workers.tensor_parallel}, so each of workers.count {workers.count} "
            f"needs as many GPUs on one machine; Ray's machines have {by_machine}, room for {room}"
        )
    return device


def gpus_by_machine() -> list[int]:
    """Return the GPUs of each of Ray's machines that has any."""
    counts = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return sorted(filter(None, counts), reverse=True)


@dataclass(frozen=True, slots=True)
class Fleet:
    """What all workers of a cluster have in common."""

    config: ClusterConfig
    workers: tuple[str, ...]
    device: str
    dtype: str
    """Resolved once, so that all workers' blocks are alike whatever their CPUs."""
    model_path: str
    model_name: str
    redis_url: str = field(repr=False)
    cluster_token: str = field(repr=False)
    cores: int
    """Cores that the workers share when all are on this machine; 0 when Ray places them."""

    def options(self, worker_id: str) -> WorkerOptions:
        """Compose what one worker is told."""
        config, workers = self.config, self.config.workers
        ranks = len(self.workers) * workers.tensor_parallel
        share = self.cores // ranks if self.cores else int(workers.num_cpus)
        return WorkerOptions(
            worker_id=worker_id,
            cluster=config.cluster,
            model_path=self.model_path,
            model_name=self.model_name,
            dtype=self.dtype,
            kv_dtype=workers.kv_dtype,
            device=self.device,
            tensor_parallel=workers.tensor_parallel,
            block_size=workers.block_size,
            pool_tokens=workers.pool_tokens,
            gpu_memory_utilization=workers.gpu_memory_utilization,
            graphs=workers.cuda_graphs,
            deterministic=workers.deterministic,
            max_step_tokens=workers.max_step_tokens,
            max_running=workers.max_running,
            max_waiting=workers.max_waiting,
            max_context=config.model.max_context,
            threads=workers.threads or max(1, share),
            host=workers.host,
            cluster_salt=config.cache_salt,
            redis_url=self.redis_url,
            lease_s=config.redis.lease_s,
            heartbeat_s=config.redis.heartbeat_s,
            redis_timeout_s=config.redis.timeout_s,
            cluster_token=self.cluster_token,
            speculation=config.speculation,
            transfer=workers.transfer,
        )


def check_names_free(cluster: str, workers: Sequence[str]) -> None:
    """Raise ClusterError when Ray already has an actor of such a name: it is somebody else's."""
    for worker in workers:
        if find_worker(cluster, worker) is not None:
            raise ClusterError(
                f"Ray already has a worker {worker!r} of a cluster {cluster!r}, started from elsewhere; "
                "stop that one or choose another `cluster:` name"
            )


def start_workers(fleet: Fleet, environment: dict[str, str]) -> None:
    """Create the actors; Ray places them when it has room."""
    gpus = 1 if fleet.device == "cuda" else 0
    placement = Placement(fleet.config.workers.num_cpus, gpus, environment)
    for worker in fleet.workers:
        create_worker(fleet.options(worker), placement)


def wait_until_serving(
    cluster: str, workers: Sequence[str], timeout_s: float, report: Callable[[str, str], None]
) -> dict[str, ActorStatus]:
    """Wait until every worker serves, reporting (worker, what it does) each time that changes.

    Raises ClusterError when one fails, or has not come up after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    status: dict[str, ActorStatus] = {}
    while len(status) < len(workers):
        for worker in workers:
            if worker in status:
                continue
            answer = _ask(cluster, worker)
            report(worker, answer["detail"] if answer else "waiting for a place in Ray")
            if answer and answer["phase"] == "serving":
                status[worker] = answer
            elif answer and answer["phase"] in ("failed", "stopped"):
                raise ClusterError(f"worker {worker}: {answer['detail']}")
        if len(status) < len(workers):
            if time.monotonic() > deadline:
                missing = ", ".join(worker for worker in workers if worker not in status)
                raise ClusterError(
                    f"after {timeout_s:g} s not serving: {missing} (workers.start_timeout_s); "
                    f"Ray's free resources: {_free_resources()}"
                )
            time.sleep(_POLL_S)
    return status


def stop_workers(cluster: str, workers: Sequence[str], grace_s: float) -> int:
    """Let workers finish for `grace_s`, then end their actors for good. Returns how many there were."""
    handles = [handle for worker in workers if (handle := find_worker(cluster, worker)) is not None]
    stopping = [handle.stop.remote(grace_s) for handle in handles]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=grace_s + _ASK_S)
    for handle in handles:
        ray.kill(handle, no_restart=True)
    for worker in workers:
        give_place_back(cluster, worker)
    return len(handles)


def _ask(cluster: str, worker: str) -> ActorStatus | None:
    handle = find_worker(cluster, worker)
    if handle is None:
        raise ClusterError(f"worker {worker}: its actor is gone")
    question: Any = handle.status.remote()
    try:
        answer: ActorStatus = ray.get(question, timeout=_ASK_S)
    except ray.exceptions.ActorDiedError as error:
        raise ClusterError(f"worker {worker}: {str(error).strip().splitlines()[-1]}") from error
    except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
        return None
    return answer


def _free_resources() -> str:
    """Say what is free in all, and what the largest machine has: the ranks of a worker share one."""
    free, kinds = ray.available_resources(), ("CPU", "GPU")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    largest = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in kinds}
    in_all, on_one = (", ".join(f"{of.get(kind, 0):g} {kind}" for kind in kinds) for of in (free, largest))
    return f"{in_all}; most on one machine, free or not: {on_one}"
