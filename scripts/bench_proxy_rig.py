"""What `kvhive bench proxy` measures: a router as `kvhive up` runs it, before workers without a model."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvhive.proto.config import parse_config, to_mapping
from kvhive.proto.errors import ClusterError
from kvhive.router.tokenizer import TextTokenizer
from kvhive.scripts.bench_proxy_worker import IDENTITY, MAX_CONTEXT, StubSpec
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.scripts.log_tail import last_line
from kvhive.scripts.owned_processes import ProcessId, send_signal
from kvhive.scripts.router_process import RouterSpec, StartingRouter, wait_routable
from kvhive.worker.model_path import resolve_model

_START_S = 120.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Rig:
    """Where everything is."""

    http: str
    """Base URL of the router."""
    grpc: str
    """host:port of the router."""
    workers: dict[str, str]
    """host:port by worker id."""
    token: str = field(repr=False)
    router_pid: int
    worker_pid: int


@contextlib.contextmanager
def running_rig(
    workers: int, step_s: float, model: str = "demo", max_context: int = MAX_CONTEXT, simulated: bool = False
) -> Iterator[Rig]:
    """Start it all, and end it all; see StubSpec. Raises ClusterError where something does not start."""
    path = resolve_model(model)
    vocab_size = TextTokenizer.load(path).vocab_size
    token = secrets.token_urlsafe(16)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvhive-bench-")))
        redis = stack.enter_context(EmbeddedRedis(folder / "redis"))
        ready = folder / "workers.json"
        stubs = StubSpec(redis.url, token, workers, step_s, vocab_size, str(ready), max_context, simulated)
        stub = stack.enter_context(_stub_process(folder, stubs))
        config = parse_config(
            {"cluster": "bench", "router": {"max_concurrent_requests": 1024}, "redis": {"lease_s": 30.0}}
        )
        spec = RouterSpec(
            config=to_mapping(config),
            redis_url=redis.url,
            cluster_token=token,
            model_path=str(path),
            model_name="stub",
            model_identity=IDENTITY.hex(),
            max_context=max_context,
            vocab_size=vocab_size,
            ready_file=str(folder / "ready.json"),
        )
        started: list[ProcessId] = []
        stack.callback(_end, started)
        endpoints = StartingRouter(
            folder, spec, lambda process: started.extend([process] if process else [])
        ).wait_ready()
        wait_routable(endpoints.grpc, token, workers)
        addresses = json.loads(ready.read_text())
        yield Rig(endpoints.http, endpoints.grpc, addresses, token, started[0].pid, stub)


@contextlib.contextmanager
def _stub_process(folder: Path, spec: StubSpec) -> Iterator[int]:
    file, log = folder / "stub.json", folder / "stub.log"
    spec.save(file)
    command = [sys.executable, "-P", "-m", "kvhive.scripts.bench_proxy_worker", str(file)]
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + _START_S
        while not Path(spec.ready_file).exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ClusterError(f"the stub workers did not start: {last_line(log)}")
            time.sleep(0.05)
        yield process.pid
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end(started: list[ProcessId]) -> None:
    for process in started:
        send_signal(process, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while os.waitpid(process.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                send_signal(process, signal.SIGKILL)
            time.sleep(0.05)
