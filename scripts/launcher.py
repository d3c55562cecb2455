"""`kvhive up`: from a configuration to a cluster that serves, or to nothing at all.

    runtime directory -> Redis -> controller (which imports) -> Ray -> workers -> supervisor
                                                                   -> router  ->

Workers and the router begin together: a router without workers lets requests wait. Each step is written down
before the next begins, so whatever ends a start half-way (an error, Ctrl-C, a crash), the same tear-down
finds and removes all of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvhive.proto.config import ClusterConfig, to_mapping
from kvhive.proto.errors import ConfigError
from kvhive.scripts.cluster_state import ClusterState, RaySession, StateFolder
from kvhive.scripts.controller_process import ControllerSpec, FirstController
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.scripts.owned_processes import RUNTIME_DIR_VARIABLE, identify
from kvhive.scripts.progress import Progress
from kvhive.scripts.ray_driver import check_answers
from kvhive.scripts.ray_head import start_head
from kvhive.scripts.redis_check import check_redis
from kvhive.scripts.router_process import READY_FILE, RouterSpec, StartingRouter, wait_routable
from kvhive.scripts.supervisor import launch_supervisor
from kvhive.scripts.teardown import interrupts_ignored, tear_down
from kvhive.worker.model_config import ModelConfig, read_model_config
from kvhive.worker.model_identity import model_identity
from kvhive.worker.model_path import resolve_model
from kvhive.worker.shard import check_can_shard

_LONGEST_TEMP_DIR = 24
"""Ray's socket paths below the runtime directory take up to 80 of the 107 bytes that a path may have."""


@dataclass(slots=True)
class Start:
    """One start under way: what is wanted, and what exists so far."""

    config: ClusterConfig
    folder: StateFolder
    report: Progress
    state: ClusterState
    model: Path
    model_config: ModelConfig
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def runtime_dir(self) -> Path:
        """Where this start keeps its sockets, logs and files."""
        return Path(self.state.runtime_dir)

    @property
    def model_name(self) -> str:
        """The name that clients use: the configured one, or the model's directory's or file's own."""
        own = self.model.stem if self.model.suffix == ".gguf" else self.model.name
        return self.config.model.name or own

    def note(self, **changes: Any) -> None:
        """Write down what exists now."""
        self.state = self.folder.save(replace(self.state, **changes))


def bring_up(config: ClusterConfig, folder: StateFolder, report: Progress, ray_address: str) -> ClusterState:
    """Start everything and return when every worker serves; the caller holds the folder's lock.

    `ray_address` names a Ray cluster to attach to; empty starts a head of our own. Raises KvhiveError;
    whatever is raised, an interrupt included, nothing that was started is left.
    """
    model = resolve_model(config.model.path).resolve()
    model_config = read_model_config(model)  # a model that cannot be served is refused before anything starts
    check_can_shard(model_config, config.workers.tensor_parallel, model)
    if config.redis.url:
        report("redis", "checking redis.url")
        check_redis(config.redis.url, config.redis.timeout_s)
    if ray_address and config.workers.host == "node" and not config.redis.url:
        raise ConfigError("redis.url: workers on other machines need a Redis that they can reach")
    if ray_address:
        report("ray", f"attaching to {ray_address}")
        check_answers(ray_address)  # said now, and not by a controller that has imported everything first
    with _runtime_dir() as runtime_dir:
        token = secrets.token_hex(32)
        state = ClusterState(config.cluster, str(runtime_dir), token, to_mapping(config))
        start = Start(config, folder, report, folder.save(state), model, model_config)
        with contextlib.ExitStack() as undo:
            undo.callback(_undo, start)
            _start_everything(start, ray_address)
            undo.pop_all()
    return start.state


def _start_everything(start: Start, ray_address: str) -> None:
    os.environ[RUNTIME_DIR_VARIABLE] = start.state.runtime_dir  # all that is started from here on carries it
    _start_redis(start)
    controller = FirstController(start.runtime_dir, lambda process: start.note(controller=process))
    _start_ray(start, ray_address)
    _start_workers(start, controller)
    router = _start_router(start)
    _wait_serving(start, controller, router)
    supervisor = launch_supervisor(start.runtime_dir, start.folder)
    start.note(ready=True, supervisor=supervisor)


def _undo(start: Start) -> None:
    with interrupts_ignored():
        start.report("stopping", "removing what was started")
        tear_down(start.folder, start.state, grace_s=0.0)


@contextlib.contextmanager
def _runtime_dir() -> Iterator[Path]:
    parent = tempfile.gettempdir()
    made = tempfile.mkdtemp(prefix="kvhive-", dir=parent if len(parent) <= _LONGEST_TEMP_DIR else "/tmp")
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, made, ignore_errors=True)
        yield Path(made)
        undo.pop_all()


def _start_ray(start: Start, address: str) -> None:
    if address:
        start.note(ray=RaySession(address))
        return
    start.report("ray", "starting a local head")
    workers, scaling = start.config.workers, start.config.autoscaling
    most = max(1, workers.count, scaling.max_workers if scaling.enabled else 0)
    ranks = most * workers.tensor_parallel
    start_head(
        start.runtime_dir,
        num_cpus=max(os.cpu_count() or 1, math.ceil(ranks * workers.num_cpus)),
        use_gpus=workers.device != "cpu",
        started=lambda session: start.note(ray=session),
    )
    start.report("ray", "running")


def _start_redis(start: Start) -> None:
    if start.config.redis.url:
        start.note(redis_url=start.config.redis.url)
        start.report("redis", "using redis.url")
        return
    start.report("redis", "starting")
    server = EmbeddedRedis(start.runtime_dir / "redis")
    server.start()
    start.note(redis_url=server.url, redis=identify(server.pid) if server.pid else None)
    start.report("redis", "running")


def _start_workers(start: Start, controller: FirstController) -> None:
    """Let the controller create the workers, and wait until it has begun."""
    start.report("workers", "starting")
    state, count = start.state, start.config.workers.count
    assert state.ray is not None
    controller.tell(
        ControllerSpec(
            config=to_mapping(start.config),
            ray_address=state.ray.address,
            ray_token=state.ray.auth_token,
            redis_url=state.redis_url,
            cluster_token=state.cluster_token,
            model_path=str(start.model),
            model_name=start.model_name,
            runtime_dir=state.runtime_dir,
            cores=(os.cpu_count() or 1) if state.ray.owned else 0,
        )
    )
    begun = controller.wait_begun()
    start.dtype, start.device = begun["dtype"], begun["device"]
    start.note(workers=tuple(f"w{number}" for number in range(1, count + 1)))


def _start_router(start: Start) -> StartingRouter:
    start.report("router", "starting")
    config, state = start.config, start.state
    limit = start.model_config.max_context
    spec = RouterSpec(
        config=to_mapping(config),
        redis_url=state.redis_url,
        cluster_token=state.cluster_token,
        model_path=str(start.model),
        model_name=start.model_name,
        model_identity=model_identity(
            start.model, start.dtype, config.workers.block_size, config.workers.kv_dtype
        ).hex(),
        max_context=min(config.model.max_context or limit, limit),
        vocab_size=start.model_config.vocab_size,
        ready_file=str(start.runtime_dir / READY_FILE),
    )
    return StartingRouter(start.runtime_dir, spec, started=lambda process: start.note(router=process))


def _wait_serving(start: Start, controller: FirstController, router: StartingRouter) -> None:
    """Wait until every worker serves, and the router sends it requests."""
    workers, state = start.config.workers, start.state
    controller.wait_serving(workers.count, workers.start_timeout_s, start.report)
    start.report("workers", f"{workers.count} serving on {start.device}")
    ready = router.wait_ready()
    start.note(grpc=ready.grpc, http=ready.http)
    wait_routable(ready.grpc, state.cluster_token, workers.count)
    start.report("router", "ready")
