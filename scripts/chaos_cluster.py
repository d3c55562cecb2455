"""What a chaos run strikes: workers, routers and Redis as plain processes, each of which can come back.

No Ray: a worker is back in a second, which is what lets a run reach a thousand faults. Where it may (root,
`ip`), workers and Redis live in network namespaces of their own, whose links can be cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from kvhive.proto.config import ClusterConfig, parse_config, to_mapping
from kvhive.scripts.bare_workers import BareWorker
from kvhive.scripts.chaos_redis import ChaosRedis, free_port
from kvhive.scripts.owned_processes import (
    RUNTIME_DIR_VARIABLE,
    ProcessId,
    end_processes,
    is_alive,
    processes_of,
    send_signal,
)
from kvhive.scripts.private_network import Place, PrivateNetwork
from kvhive.scripts.random_model import RandomModel, write_random_model
from kvhive.scripts.random_tokenizer import write_random_tokenizer
from kvhive.scripts.router_process import RouterSpec, StartingRouter
from kvhive.worker.model_identity import model_identity
from kvhive.worker.options import WorkerOptions

CLUSTER = "chaos"
MODEL = RandomModel(layers=2, hidden=64, heads=2, kv_heads=2, vocabulary=512, context=1024)
LEASE_S = 5.0
POOL_TOKENS = 4096
"""Small enough that prompts evict each other all the time."""


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """How much of everything there is."""

    workers: int = 3
    routers: int = 2
    sentinel: bool = True
    """A master, a replica and a sentinel, instead of one Redis."""
    links: bool = True
    """Network namespaces, whose links can be cut; not on Ray."""
    ray: bool = False
    """As chaos_ray_cluster.py has it, with two routers."""


class RouterProcess:
    """One router, at the same two ports for ever."""

    def __init__(self, folder: Path, spec: Callable[[], RouterSpec], grpc: str, http: str) -> None:
        """`spec` says what it is told, each time that it is started."""
        self._folder = folder
        self._spec = spec
        self._process: ProcessId | None = None
        self.grpc = grpc
        """host:port."""
        self.http = http
        """Base URL."""

    @property
    def name(self) -> str:
        """For people."""
        return self._folder.name

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until its doors are open. Raises ClusterError."""
        self._folder.mkdir(exist_ok=True)
        spec = self._spec()
        Path(spec.ready_file).unlink(missing_ok=True)
        log = self._folder / "router.log"
        if log.exists():  # of the process before
            with (self._folder / "earlier.log").open("ab") as earlier:
                earlier.write(log.read_bytes())
        StartingRouter(self._folder, spec, self._started).wait_ready()

    def _started(self, process: ProcessId | None) -> None:
        self._process = process

    def signal(self, what: signal.Signals) -> None:
        """Send its process a signal, if it lives."""
        if self._process is not None:
            send_signal(self._process, what)

    @property
    def alive(self) -> bool:
        """Whether its process runs, frozen or not."""
        return is_alive(self._process)

    def end(self) -> None:
        """Kill it."""
        mine = self._process
        end_processes(lambda: [mine] if mine else [], 0.0)
        if mine is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(mine.pid, 0)

    def retire(self, within_s: float) -> None:
        """Ask it to end, as `kvhive down` does, and wait."""
        mine = self._process
        end_processes(lambda: [mine] if mine else [], within_s)
        self.end()


class ChaosCluster:
    """All of it. Built by `chaos_cluster`."""

    def __init__(
        self,
        folder: Path,
        redis: ChaosRedis,
        network: PrivateNetwork | None,
        workers: dict[str, tuple[BareWorker, Place | None]],
        routers: list[RouterProcess],
    ) -> None:
        self.folder = folder
        self.redis = redis
        self.network = network
        self.workers = [worker for worker, _ in workers.values()]
        self.places = {worker_id: place for worker_id, (_, place) in workers.items() if place is not None}
        self.routers = routers

    async def start(self) -> None:
        """Start workers and routers. Raises ClusterError."""
        for start in [each.start for each in self.workers] + [each.start for each in self.routers]:
            await asyncio.to_thread(start)

    async def end(self) -> None:
        """End them."""
        for worker in self.workers:
            await worker.disconnect()
            await asyncio.to_thread(worker.end)
        for router in self.routers:
            await asyncio.to_thread(router.end)

    async def look(self) -> list[str]:
        """Say who does not run, and which processes of this run belong to nobody."""
        gone = [worker.worker_id for worker in self.workers if not worker.alive]
        gone += [router.name for router in self.routers if not router.alive]
        if gone:
            return [f"not running: {gone}"]
        strangers = await asyncio.to_thread(self._strangers)
        return [f"processes that nobody knows: {strangers}"] if strangers else []

    def _strangers(self) -> list[int]:
        known = {worker.pid for worker in self.workers} | {router.pid for router in self.routers}
        known |= self.redis.pids() | {forkserver._forkserver._forkserver_pid or 0}  # type: ignore[attr-defined]
        known.add(resource_tracker._resource_tracker._pid or 0)  # type: ignore[attr-defined]
        return [process.pid for process in processes_of(self.folder) if process.pid not in known]


@contextlib.contextmanager
def chaos_cluster(size: ClusterSize, logs: Path | None = None) -> Iterator[ChaosCluster]:
    """Make everything but start only Redis; what was started meanwhile is ended with the context.

    What all said is kept in `logs`, if given.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvhive-chaos-")))
        if logs is not None:
            stack.callback(shutil.copytree, folder, logs, ignore=shutil.ignore_patterns("model", "*.json"))
        stack.enter_context(marked_environment(folder))
        stack.callback(end_processes, lambda: processes_of(folder), 0.0)
        network = stack.enter_context(PrivateNetwork()) if size.links else None
        host = network.host if network else "127.0.0.1"
        places = (network.place(), network.place()) if network else ()
        redis = stack.enter_context(ChaosRedis(folder, host, places, size.sentinel))
        model = write_random_model(folder / "model", MODEL)
        write_random_tokenizer(model, MODEL.vocabulary)
        token = secrets.token_hex(16)
        workers: dict[str, tuple[BareWorker, Place | None]] = {}
        for number in range(1, size.workers + 1):
            place = network.place() if network else None
            options = _worker_options(f"w{number}", model, redis.url, token)
            workers[options.worker_id] = _worker(options, place)
        routers = [
            _router(folder / f"r{number}", model, redis.url, token) for number in range(1, size.routers + 1)
        ]
        yield ChaosCluster(folder, redis, network, workers, routers)


@contextlib.contextmanager
def marked_environment(folder: Path) -> Iterator[None]:
    """Mark all processes that are started as of `folder`: the fork server too, so it must be a new one."""
    before = os.environ.get(RUNTIME_DIR_VARIABLE)
    os.environ[RUNTIME_DIR_VARIABLE] = str(folder)
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        if before is None:
            del os.environ[RUNTIME_DIR_VARIABLE]
        else:
            os.environ[RUNTIME_DIR_VARIABLE] = before


def _worker_options(worker_id: str, model: Path, redis_url: str, token: str) -> WorkerOptions:
    return WorkerOptions(
        worker_id=worker_id,
        cluster=CLUSTER,
        model_path=str(model),
        model_name="random",
        redis_url=redis_url,
        cluster_token=token,
        pool_tokens=POOL_TOKENS,
        lease_s=LEASE_S,
    )


def _worker(options: WorkerOptions, place: Place | None) -> tuple[BareWorker, Place | None]:
    if place is None:
        return BareWorker(options), None
    there = dataclasses.replace(options, host=place.address)
    return BareWorker(there, place.name), place


def _router(folder: Path, model: Path, redis_url: str, token: str) -> RouterProcess:
    grpc_port, http_port = free_port(), free_port()
    ports = {"grpc_port": grpc_port, "http_port": http_port}
    config: ClusterConfig = parse_config({"cluster": CLUSTER, "router": ports, "redis": {"lease_s": LEASE_S}})
    spec = RouterSpec(
        config=to_mapping(config),
        redis_url=redis_url,
        cluster_token=token,
        model_path=str(model),
        model_name="random",
        model_identity=model_identity(
            model, "float32", config.workers.block_size, config.workers.kv_dtype
        ).hex(),
        max_context=MODEL.context,
        vocab_size=MODEL.vocabulary,
        ready_file=str(folder / "ready.json"),
    )
    return RouterProcess(folder, lambda: spec, f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{http_port}")
