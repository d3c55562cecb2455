"""A Ray head of our own, for a cluster on one machine.

It runs as one process group in its own temp directory, on a loopback address that Ray keeps (it would
replace 127.0.0.1 by the machine's), with a token of its own, and without dashboard, usage report and whatever
else costs each start a second of a core and serves nobody here.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvhive.proto.errors import ClusterError
from kvhive.scripts.cluster_state import RaySession
from kvhive.scripts.log_tail import last_line
from kvhive.scripts.owned_processes import identify
from kvhive.scripts.ray_head_hook import leave_out

HEAD_IP = "127.0.1.1"
_OBJECT_STORE_BYTES = 100_000_000
"""We pass no objects through Ray's store; this is near its minimum."""
_ATTEMPTS = 3
"""Ray gives a node 30 s to start, whatever the machine's load; a slow machine deserves another try."""
_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 15.0
LONGEST_START_S = _ATTEMPTS * (_START_TIMEOUT_S + _STOP_TIMEOUT_S)
"""All tries together."""
_STARTED_MARK = b"Ray runtime started"


def start_head(
    runtime_dir: Path, num_cpus: int, use_gpus: bool, started: Callable[[RaySession], None]
) -> RaySession:
    """Start a head and return its session; `started` gets the session as soon as the process exists.

    Raises ClusterError when Ray does not come up.
    """
    log = runtime_dir / "ray-head.log"
    for attempt in range(_ATTEMPTS):
        session, process = _launch(runtime_dir / f"ray{attempt}", log, num_cpus, use_gpus)
        started(session)
        if _wait_started(process, log):
            return session
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    raise ClusterError(f"Ray did not start after {_ATTEMPTS} tries: {last_line(log)}")


def head_environment(token: str) -> dict[str, str]:
    """Return what a head, its nodes and its drivers must agree on."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}


def _launch(
    temp_dir: Path, log: Path, num_cpus: int, use_gpus: bool
) -> tuple[RaySession, subprocess.Popen[bytes]]:
    token = secrets.token_hex(32)
    port = _free_port()
    command = [
        str(Path(sys.executable).parent / "ray"),
        *("start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=false"),
        "--no-monitor",  # it asks a cloud for machines
        "--include-log-monitor=false",  # it sends drivers what workers write; ours reads it in no case
        f"--port={port}",
        f"--node-ip-address={HEAD_IP}",
        f"--num-cpus={num_cpus}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={temp_dir}",
        *(() if use_gpus else ("--num-gpus=0",)),
    ]
    environment = {
        **os.environ,
        **head_environment(token),
        "RAY_agent_register_timeout_ms": "90000",
        "RAY_START_HOOK": f"{leave_out.__module__}.{leave_out.__name__}",
    }
    environment.pop("RAY_ADDRESS", None)
    if not Path(command[0]).exists():
        raise ClusterError(f"{command[0]} is missing: is ray installed in this environment?")
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return RaySession(f"{HEAD_IP}:{port}", token, identify(process.pid)), process


def _wait_started(process: subprocess.Popen[bytes], log: Path) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if _STARTED_MARK in log.read_bytes():
            return True
        time.sleep(0.1)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HEAD_IP, 0))
        return int(probe.getsockname()[1])
