"""The controller's process: `python -m kvhive.scripts.control <controller.json>`, as `kvhive up` runs it.

One a cluster: it holds a lock in the runtime directory. SIGTERM or SIGINT ends it and no worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from kvhive.proto.config import ClusterConfig, parse_config
from kvhive.proto.errors import ClusterError, KvhiveError
from kvhive.proto.index_schema import IndexKeys
from kvhive.router.auth.cluster_secret import operator_key
from kvhive.router.redis_connection import open_redis
from kvhive.router.worker_registry import ModelSpec, WorkerRegistry
from kvhive.scripts.autoscaler import Autoscaler
from kvhive.scripts.cluster_state import RaySession
from kvhive.scripts.control_socket import serve_control
from kvhive.scripts.controller import Controller, Surroundings, answers
from kvhive.scripts.controller_process import ControllerSpec
from kvhive.scripts.fleet_memory import FleetMemory
from kvhive.scripts.index_holds import IndexHolds
from kvhive.scripts.owned_processes import RUNTIME_DIR_VARIABLE
from kvhive.scripts.ray_driver import connected
from kvhive.scripts.router_counts import RouterPoll
from kvhive.scripts.router_process import READY_FILE
from kvhive.scripts.worker_calls import WorkerCalls
from kvhive.worker.model_config import read_model_config, resolve_dtype
from kvhive.worker.model_identity import model_identity

log = logging.getLogger(__name__)

STEP_S = 0.5
MAX_FAILED_STEPS = 20
"""In a row: after some ten seconds without Ray a fresh process has better chances."""


def main(arguments: list[str]) -> int:
    """Run a controller until it is told to stop; return the exit status."""
    logging.basicConfig(
        level=logging.INFO, format="time=%(asctime)s level=%(levelname)s at=%(name)s %(message)s"
    )
    if len(arguments) != 1:
        print("usage: python -m kvhive.scripts.control <controller.json>", file=sys.stderr)
        return 2
    try:
        spec = ControllerSpec.wait(Path(arguments[0]))
        with _only_one(Path(spec.runtime_dir)), connected(RaySession(spec.ray_address, spec.ray_token)):
            asyncio.run(_run(spec))
    except KvhiveError as error:
        print(f"controller: {error}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def _only_one(runtime_dir: Path) -> Iterator[None]:
    descriptor = os.open(runtime_dir / "controller.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ClusterError("another controller of this cluster runs already") from error
    finally:
        os.close(descriptor)


async def _run(spec: ControllerSpec) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    config = parse_config(spec.config)
    memory = await asyncio.to_thread(_remember, spec, config)
    async with _controller(spec, config, memory) as controller:
        await control(controller, Path(spec.runtime_dir), stop)


async def control(controller: Controller, runtime_dir: Path, stop: asyncio.Event) -> None:
    """Step until told to stop; answer from when the first step has seen which workers there are."""
    failed, server = 0, None
    while not stop.is_set():
        try:
            await controller.step()
            failed = 0
        except Exception:  # this process' outermost edge: a step that fails is tried again, some times
            failed += 1
            log.exception("a step failed for the %d. time", failed)
            if failed >= MAX_FAILED_STEPS:
                raise
        else:
            server = server or await serve_control(runtime_dir, answers(controller))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), STEP_S)
    if server is not None:
        server.close()


@contextlib.asynccontextmanager
async def _controller(
    spec: ControllerSpec, config: ClusterConfig, memory: FleetMemory
) -> AsyncIterator[Controller]:
    from kvhive.scripts.fleet_actors import FleetActors, draining_nodes
    from kvhive.scripts.worker_fleet import Fleet, free_resources

    fleet = Fleet(
        config=config,
        device=memory.device,
        dtype=memory.dtype,
        model_path=spec.model_path,
        model_name=spec.model_name,
        redis_url=spec.redis_url,
        cluster_token=spec.cluster_token,
        cores=spec.cores,
    )
    actors = FleetActors(fleet, {RUNTIME_DIR_VARIABLE: spec.runtime_dir})
    workers, keys = config.workers, IndexKeys(config.cluster)
    identity = model_identity(Path(spec.model_path), memory.dtype, workers.block_size, workers.kv_dtype)
    async with open_redis(spec.redis_url, config.redis.timeout_s) as redis:
        registry = WorkerRegistry(
            redis,
            keys,
            ModelSpec(identity.hex(), workers.block_size),
            lease_s=config.redis.lease_s,
            cooldown_s=config.router.failure_cooldown_s,
        )
        around = Surroundings(
            actors=actors,
            leaving_nodes=draining_nodes,
            workers=registry.views,
            calls=WorkerCalls(spec.cluster_token),
            index=IndexHolds(redis, keys),
            free=free_resources,
            clock=time.monotonic,
            lease_s=config.redis.lease_s,
        )
        routers = RouterPoll(Path(spec.runtime_dir) / READY_FILE, operator_key(spec.cluster_token))
        scaling = config.autoscaling
        policy = Autoscaler(scaling, memory.wanted, routers.counts) if scaling.enabled else None
        controller = Controller(memory, around, workers.warm_s if workers.transfer.enabled else 0.0, policy)
        following = asyncio.gather(registry.run(), *([routers.run()] if policy else []))
        try:
            yield controller
        finally:
            following.cancel()
            await controller.close()
            await around.calls.retain(set())
            await asyncio.gather(following, return_exceptions=True)


def _remember(spec: ControllerSpec, config: ClusterConfig) -> FleetMemory:
    """Return what an earlier controller wrote down; the first one decides. Raises ClusterError."""
    from kvhive.scripts import worker_fleet

    memory = FleetMemory.load(Path(spec.runtime_dir))
    if memory is None:
        worker_fleet.check_names_free(config.cluster)
        device = worker_fleet.choose_device(config, may_grow=not spec.ray_token)
        dtype = resolve_dtype(read_model_config(Path(spec.model_path)), config.model.dtype, device)
        memory = FleetMemory(spec.runtime_dir, config.workers.count, device, dtype)
        memory.save()
    return memory


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
