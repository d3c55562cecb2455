"""Machines that are none: a node provider for Ray's autoscaler whose nodes are `ray start` on this machine.

Each node has a loopback address of its own (127.0.1.N) and whatever resources its type claims, such as a GPU
that is not there. For trying out autoscaling; named in a cluster file as

    provider: {type: external, module: kvhive.scripts.loopback_nodes.LoopbackNodes, gcs_address: ..., ...}

Three rules, each learnt from a failure. A node is listed before its raylet registers, or autoscaler v2 counts
it twice. Nodes start one after the other: two at once in one session directory fight over a socket's name. A
start that failed is followed by a pause, or autoscaler v1 tries again every second.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

HEAD_TYPE = "ray.head.default"
HEAD_IP = "127.0.1.1"
STARTED_MARK = "Ray runtime started"
_START_TIMEOUT_S = 180.0
_PAUSE_S = 5.0
_STOP_S = 30.0
_OBJECT_STORE_BYTES = 80_000_000
_AGENT_PORTS = (
    *("dashboard-agent-grpc-port", "dashboard-agent-listen-port"),
    *("metrics-export-port", "runtime-env-agent-port"),
)


@dataclass(slots=True)
class _Node:
    ip: str
    tags: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    """None before its turn to start, and for the head."""


class LoopbackNodes(NodeProvider):  # type: ignore[misc]  # ray has no types
    """Starts and ends nodes. What Ray asks of a provider is documented at NodeProvider."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        """`provider_config` has `gcs_address`, `head_node_id` and `log_dir`."""
        super().__init__(provider_config, cluster_name)
        self._address: str = provider_config["gcs_address"]
        self._log_dir = Path(provider_config["log_dir"])
        self._lock = threading.RLock()
        self._last_ip = 1
        head: str = provider_config["head_node_id"]
        tags = {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, **_tags(HEAD_TYPE, head)}
        self._nodes = {head: _Node(HEAD_IP, tags)}
        self._to_start: queue.Queue[tuple[str, list[str], dict[str, str]]] = queue.Queue()
        threading.Thread(target=self._start_nodes, daemon=True).start()

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """Return the nodes that have all these tags."""
        with self._lock:
            ended = [
                name for name, node in self._nodes.items() if node.process and node.process.poll() is not None
            ]
            for name in ended:
                del self._nodes[name]
            wanted = tag_filters.items()
            return [name for name, node in self._nodes.items() if wanted <= node.tags.items()]

    def is_running(self, node_id: str) -> bool:
        """Whether a node is there, or will be."""
        return node_id in self._nodes

    def is_terminated(self, node_id: str) -> bool:
        """Whether it is gone."""
        return node_id not in self._nodes

    def node_tags(self, node_id: str) -> dict[str, str]:
        """Return a node's tags."""
        return self._nodes[node_id].tags

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        """Add to a node's tags."""
        self._nodes[node_id].tags.update(tags)

    def internal_ip(self, node_id: str) -> str:
        """Return a node's address."""
        return self._nodes[node_id].ip

    external_ip = internal_ip

    def create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags: dict[str, str],
        count: int,
        resources: dict[str, Any],
        labels: dict[str, str],
    ) -> None:
        """List `count` nodes at once, and start them in turn."""
        for _ in range(count):
            name = f"loopback-{uuid.uuid4().hex[:8]}"
            with self._lock:
                self._last_ip += 1
                node = _Node(
                    f"127.0.1.{self._last_ip}", {**tags, **_tags(tags[TAG_RAY_USER_NODE_TYPE], name)}
                )
                self._nodes[name] = node
            environment = {
                **os.environ,
                "RAY_CLOUD_INSTANCE_ID": name,
                "RAY_NODE_TYPE_NAME": tags[TAG_RAY_USER_NODE_TYPE],
            }
            self._to_start.put((name, self._command(node.ip, resources), environment))

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        """Create nodes that claim one CPU."""
        self.create_node_with_resources_and_labels(node_config, tags, count, {"CPU": 1}, {})

    def terminate_node(self, node_id: str) -> None:
        """End a node, without waiting for it."""
        with self._lock:
            node = self._nodes.pop(node_id, None)
        if node is not None and node.process is not None:
            threading.Thread(target=_end, args=(node.process,), daemon=True).start()

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Nothing is to be prepared."""
        return cluster_config

    def _command(self, ip: str, resources: dict[str, Any]) -> list[str]:
        claims = {**resources}
        cpus, gpus = claims.pop("CPU", 0), claims.pop("GPU", 0)
        store = claims.pop("object_store_memory", _OBJECT_STORE_BYTES)
        claims.pop("memory", None)
        return [
            str(Path(sys.executable).parent / "ray"),
            *("start", "--block", "--disable-usage-stats", f"--address={self._address}"),
            *(f"--node-ip-address={ip}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"),
            *(f"--object-store-memory={store}", f"--resources={json.dumps(claims)}"),
            *agent_ports(ip),
        ]

    def _start_nodes(self) -> None:
        while True:
            name, command, environment = self._to_start.get()
            log = self._log_dir / f"{name}.log"
            with self._lock, log.open("wb") as output:
                node = self._nodes.get(name)
                if node is None:  # ended before its turn
                    continue
                node.process = process = subprocess.Popen(
                    command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            if not _begun(process, log):
                process.kill()
                process.wait()
                with self._lock:
                    self._nodes.pop(name, None)
                time.sleep(_PAUSE_S)


def agent_ports(ip: str) -> list[str]:
    """Return options that name the ports of a node's agents.

    What Ray is to choose by itself it waits 15 s for, which a busy machine may not keep.
    """
    chosen = zip(_AGENT_PORTS, free_ports(ip, len(_AGENT_PORTS)), strict=True)
    return [f"--{option}={port}" for option, port in chosen]


def free_ports(ip: str, count: int) -> list[int]:
    """Return ports that nobody listens on at an address."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for entry in sockets:
            entry.bind((ip, 0))
        return [int(entry.getsockname()[1]) for entry in sockets]
    finally:
        for entry in sockets:
            entry.close()


def _begun(process: subprocess.Popen[bytes], log: Path) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if STARTED_MARK in log.read_text(errors="replace"):
            return True
        time.sleep(0.1)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tags(kind: str, name: str) -> dict[str, str]:
    return {
        TAG_RAY_USER_NODE_TYPE: kind,
        TAG_RAY_NODE_NAME: name,
        TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
    }
