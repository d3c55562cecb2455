"""The workers of one cluster: what each is told, on what device, and how all of them are ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import ray

from kvhive.proto.config import ClusterConfig
from kvhive.proto.errors import ClusterError
from kvhive.scripts.worker_vocabulary import load_vocabulary
from kvhive.worker.actor import find_worker, give_place_back, list_workers
from kvhive.worker.options import WorkerOptions

_STOP_EXTRA_S = 2.0


def most_workers(config: ClusterConfig) -> int:
    """Return how many workers a machine of ours is shared out to."""
    scaling = config.autoscaling
    return max(1, config.workers.count, scaling.max_workers if scaling.enabled else 0)


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
    device: str
    dtype: str
    """Resolved once, so that all workers' blocks are alike whatever their CPUs."""
    model_path: str
    model_name: str
    redis_url: str = field(repr=False)
    cluster_token: str = field(repr=False)
    cores: int
    """Cores that `most_workers` share when all are on this machine; 0 when Ray places them."""

    def options(self, worker_id: str) -> WorkerOptions:
        """Compose what one worker is told."""
        config, workers = self.config, self.config.workers
        ranks = most_workers(config) * workers.tensor_parallel
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
            pin_share=workers.pin_share,
            pin_tenant_share=workers.pin_tenant_share,
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
            load_vocabulary=load_vocabulary,
        )


def check_names_free(cluster: str) -> None:
    """Raise ClusterError when Ray already has a worker of such a cluster: it is somebody else's."""
    for worker in list_workers(cluster):
        raise ClusterError(
            f"Ray already has a worker {worker!r} of a cluster {cluster!r}, started from elsewhere; "
            "stop that one or choose another `cluster:` name"
        )


def stop_workers(cluster: str, grace_s: float) -> int:
    """Let all workers finish for `grace_s`, then end their actors for good. Returns how many there were."""
    workers = list_workers(cluster)
    handles = [handle for worker in workers if (handle := find_worker(cluster, worker)) is not None]
    stopping = [handle.stop.remote(grace_s) for handle in handles]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=grace_s + _STOP_EXTRA_S)
    for handle in handles:
        ray.kill(handle, no_restart=True)
    for worker in workers:
        give_place_back(cluster, worker)
    return len(handles)


def free_resources() -> str:
    """Say what is free in all, and what the largest machine has: the ranks of a worker share one."""
    free, kinds = ray.available_resources(), ("CPU", "GPU")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    largest = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in kinds}
    in_all, on_one = (", ".join(f"{of.get(kind, 0):g} {kind}" for kind in kinds) for of in (free, largest))
    return f"{in_all}; most on one machine, free or not: {on_one}"
