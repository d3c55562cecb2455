"""`python -m kvhive.scripts.try_autoscaler`: Ray's real autoscaler at work on load that comes and goes.

On this machine, without a GPU or a cloud: nodes are `ray start` on loopback addresses (loopback_nodes.py) and
claim a GPU each; workers reserve one but compute on the CPU. It prints when what happened, and ends with 1
when a request failed, a worker or node did not come or go, or the number of workers changed its direction
more than once for each step of the load.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from kvhive.proto.errors import ClusterError, KvhiveError
from kvhive.scripts.client import RouterClient
from kvhive.scripts.cluster_state import StateFolder
from kvhive.scripts.control_socket import ask
from kvhive.scripts.log_tail import last_line
from kvhive.scripts.loopback_nodes import HEAD_IP, HEAD_TYPE, STARTED_MARK, agent_ports, free_ports
from kvhive.scripts.owned_processes import RUNTIME_DIR_VARIABLE, end_processes, processes_of
from kvhive.scripts.ray_head import head_environment
from kvhive.scripts.status_report import status_document

NODES = 2
"""Most nodes with a GPU, and workers."""
IDLE_MINUTES = 2.0
"""Longer than a node takes to start: v1 ends one that is idle for so long, also while it boots."""
PROMPT_TOKENS = 48
"""Short: what is chance in the load is smoothed for as long as few, large requests need, up to twenty minutes
(router/autoscaling_forecast.py), and nobody wants to watch that."""
ANSWER_TOKENS = 16
_HEAD_ID = "f" * 51 + "00000"
_HEAD_TIMEOUT_S = 180.0


class Timeline:
    """What happened when, printed as it happens."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.events: list[dict[str, Any]] = []

    def __call__(self, what: str) -> None:
        """Note an event."""
        at = time.monotonic() - self._began
        self.events.append({"at_s": round(at, 1), "what": what})
        print(f"{at:7.1f} s  {what}", flush=True)


def cluster_file(folder: Path, address: str) -> Path:
    """Write what Ray's autoscaler is told: up to NODES nodes with a GPU each, and when to end them."""
    gpu = {"resources": {"CPU": 1, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": NODES}
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    lists = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    config = {
        "cluster_name": "loopback",
        "max_workers": NODES,
        "upscaling_speed": 100.0,
        "idle_timeout_minutes": IDLE_MINUTES,
        "provider": {
            "type": "external",
            "module": "kvhive.scripts.loopback_nodes.LoopbackNodes",
            "gcs_address": address,
            "head_node_id": _HEAD_ID,
            "log_dir": str(folder),
            "launch_multiple": True,
            "use_internal_ips": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "metadata": {},
        "head_node_type": HEAD_TYPE,
        "available_node_types": {"gpu": gpu, HEAD_TYPE: head},
        **{f"{name}_commands": [] for name in lists},
    }
    path = folder / "cluster.json"
    path.write_text(json.dumps(config))
    return path


@contextlib.contextmanager
def autoscaling_head(folder: Path, v2: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Run a Ray head with an autoscaler; yield its address and the environment of whoever attaches."""
    port, client_port = free_ports(HEAD_IP, 2)
    address = f"{HEAD_IP}:{port}"
    agreed = head_environment(secrets.token_hex(32))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        **agreed,
        RUNTIME_DIR_VARIABLE: str(folder),
        "RAY_agent_register_timeout_ms": "120000",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "300",  # v1 gives a node 30 s to be heard of, or ends it
        "AUTOSCALER_METRIC_PORT": "0",
    }
    if v2:
        environment |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": _HEAD_ID}
    log = folder / "head.log"
    command = [
        str(Path(sys.executable).parent / "ray"),
        *("start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=false"),
        *(f"--port={port}", f"--node-ip-address={HEAD_IP}"),
        *(f"--ray-client-server-port={client_port}", "--num-cpus=0", "--num-gpus=0"),
        *("--object-store-memory=100000000", f"--temp-dir={folder}/ray"),
        f"--autoscaling-config={cluster_file(folder, address)}",
        *agent_ports(HEAD_IP),
    ]
    with log.open("wb") as output:
        subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _until(
            lambda: STARTED_MARK in log.read_text(errors="replace"), _HEAD_TIMEOUT_S, lambda: last_line(log)
        )
        yield address, agreed
    finally:
        end_processes(lambda: processes_of(folder), grace_s=20.0)


class Load:
    """Clients that ask one after the other until they are stopped; each prompt is a new one."""

    def __init__(self, http: str, clients: int) -> None:
        self._url = f"{http}/v1/completions"
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(clients)]
        self.answered = 0
        self.failures: list[str] = []

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let what was asked be answered."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        source = random.Random(seed)
        while not self._stop.is_set():
            tokens = [source.randrange(10, 250) for _ in range(PROMPT_TOKENS)]
            body = {"prompt": tokens, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
            request = urllib.request.Request(
                self._url, json.dumps(body).encode(), {"content-type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=300) as answer:
                    json.load(answer)
                self.answered += 1
            except (OSError, ValueError) as error:
                self.failures.append(repr(error))


class Cluster:
    """A cluster on that Ray, by the command line that people use."""

    def __init__(self, folder: Path, agreed: dict[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._environment = {**inherited, **agreed, "KVHIVE_STATE_DIR": str(folder / "state")}
        self._state = StateFolder(folder / "state", "default")

    def __call__(self, *arguments: str) -> str:
        """Run a command to its end and return what it printed. Raises ClusterError."""
        command = [sys.executable, "-P", "-m", "kvhive.scripts.cli", *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"kvhive {arguments[0]}: {done.stderr.strip()}")
        return done.stdout

    def status(self) -> dict[str, Any]:
        """Return what `kvhive status --json` prints, for less. Raises KvhiveError."""
        state = self._state.require()
        with RouterClient(state.grpc) as client:
            fleet = ask(Path(state.runtime_dir), {"do": "fleet"})
            return status_document(state, client.cluster(), fleet)


class Watch:
    """Follows what the cluster wants and has, on a thread, and notes each change."""

    def __init__(self, cluster: Cluster, note: Timeline) -> None:
        self._cluster = cluster
        self._note = note
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.wanted: list[int] = []
        self.states: dict[str, str] = {}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def serving(self) -> int:
        """Workers that serve."""
        return sum(state == "serving" for state in self.states.values())

    def turns(self) -> int:
        """How often the number that is wanted changed its direction."""
        steps = [after - before for before, after in itertools.pairwise(self.wanted)]
        return sum((first > 0) != (then > 0) for first, then in itertools.pairwise(steps))

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            try:
                status = self._cluster.status()
            except KvhiveError as error:
                self._note(f"status: {error}")
                continue
            fleet = status["fleet"]
            if not self.wanted or fleet["wanted"] != self.wanted[-1]:
                self.wanted.append(fleet["wanted"])
                self._note(f"workers wanted: {fleet['wanted']} ({fleet['reason']})")
            states = {worker["id"]: worker["state"] for worker in status["workers"]}
            for worker in sorted(states.keys() | self.states.keys()):
                before, now = self.states.get(worker), states.get(worker, "gone")
                if before != now:
                    self._note(f"{worker}: {now}")
            self.states = states


def nodes_alive(folder: Path) -> int:
    """Return how many loopback nodes run their raylet."""
    count, head = 0, f"--node_ip_address={HEAD_IP}".encode()
    for process in processes_of(folder):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            count += command[0].endswith(b"/raylet") and head not in command
    return count


def _try(folder: Path, model: str, v2: bool, clients: int, note: Timeline) -> dict[str, Any]:
    with autoscaling_head(folder, v2) as (address, agreed):
        note("Ray's head is up, without a node")
        cluster = Cluster(folder, agreed)
        changes = {
            "model.path": model,
            "model.dtype": "float32",
            "workers.count": 1,
            "workers.device": "cpu",
            "workers.num_gpus": 1,
            "workers.threads": 1,
            "workers.start_timeout_s": 900,
            "autoscaling.enabled": True,
            "autoscaling.max_workers": NODES,
            "autoscaling.ttft_goal_s": 0.5,
            "autoscaling.startup_s": 30,
            "autoscaling.down_after_s": 30,
            "autoscaling.down_cooldown_s": 10,
            "autoscaling.max_step_down": 1,
        }
        try:
            cluster("up", "--address", address, *(f"--set={key}={value}" for key, value in changes.items()))
            note(f"the cluster is up, with {nodes_alive(folder)} node")
            return _load_comes_and_goes(folder, cluster, clients, note)
        finally:
            cluster("down", "--grace", "2")
            note("the cluster is down")


def _load_comes_and_goes(folder: Path, cluster: Cluster, clients: int, note: Timeline) -> dict[str, Any]:
    load = Load(cluster.status()["endpoints"]["http"], clients)
    with Watch(cluster, note) as watch:
        _until(lambda: watch.serving() == 1, 60.0, lambda: str(watch.states))
        note(f"load begins: {clients} clients")
        load.start()
        try:
            _until(lambda: watch.serving() == NODES, 900.0, lambda: str(watch.states))
            note(f"{NODES} workers serve on {nodes_alive(folder)} nodes")
            time.sleep(10.0)
        finally:
            load.stop()
        note(f"load ends: {load.answered} answers, {len(load.failures)} failures")
        _until(lambda: watch.serving() == 1 and len(watch.states) == 1, 600.0, lambda: str(watch.states))
        note("one worker is left")
        _until(lambda: nodes_alive(folder) == 1, 600.0, lambda: f"{nodes_alive(folder)} nodes")
        note("one node is left")
    return {
        "answered": load.answered,
        "failures": load.failures,
        "wanted": watch.wanted,
        "turns": watch.turns(),
        "events": note.events,
    }


def _until(reached: Callable[[], bool], within_s: float, otherwise: Callable[[], str]) -> None:
    deadline = time.monotonic() + within_s
    while not reached():
        if time.monotonic() > deadline:
            raise ClusterError(f"not within {within_s:g} s: {otherwise()}")
        time.sleep(0.3)


@click.command()
@click.option("--model", default="demo", show_default=True, help="What the workers serve.")
@click.option("--v2", is_flag=True, help="Ray's autoscaler v2 rather than v1.")
@click.option("--clients", type=click.IntRange(1, 256), default=12, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="End with all of it as JSON.")
def main(model: str, v2: bool, clients: int, as_json: bool) -> None:
    """Let load make nodes, and their end make them go."""
    folder = Path(tempfile.mkdtemp(prefix="kvhive-", dir="/tmp"))
    note = Timeline()
    try:
        found = _try(folder, model, v2, clients, note)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    good = not found["failures"] and found["turns"] <= 1
    if as_json:
        print(json.dumps(found))
    print(f"workers wanted {found['wanted']}, {found['answered']} answers, {len(found['failures'])} failures")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
