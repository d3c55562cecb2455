"""What a chaos run strikes: the contract of chaos_cluster.py and chaos_ray_cluster.py."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Protocol

from kvhive.proto.v1 import worker_pb2
from kvhive.scripts.chaos_redis import ChaosRedis


class Process(Protocol):
    """Somebody who can be struck. Calls but properties may block."""

    @property
    def pid(self) -> int:
        """Of the process that it has now. An OSError or assertion when it never had one."""

    @property
    def alive(self) -> bool:
        """Whether that runs, frozen or not."""

    def signal(self, what: signal.Signals) -> None:
        """Send it a signal."""

    def end(self) -> None:
        """Kill it."""

    def retire(self, within_s: float) -> None:
        """Let it say goodbye."""

    def start(self) -> None:
        """Have it back, whoever does that, and wait until it serves. Raises ClusterError."""


class Worker(Process, Protocol):
    """One worker."""

    @property
    def worker_id(self) -> str:
        """Its name."""

    async def status(self, audit: bool = False) -> worker_pb2.GetStatusResponse:
        """Return its accounting. Raises AioRpcError."""


class Router(Process, Protocol):
    """One router, at the same doors for ever."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def grpc(self) -> str:
        """host:port."""

    @property
    def http(self) -> str:
        """Base URL."""


class Cluster(Protocol):
    """All of it."""

    @property
    def workers(self) -> Sequence[Worker]:
        """Those that there are now."""

    @property
    def routers(self) -> Sequence[Router]:
        """Always the same."""

    @property
    def redis(self) -> ChaosRedis:
        """Its Redis."""

    async def start(self) -> None:
        """Start workers and routers. Raises ClusterError."""

    async def end(self) -> None:
        """End them."""

    async def look(self) -> list[str]:
        """Say what is wrong with its processes, all of which should be there, and no others.

        Raises OSError or ClusterError where that cannot be said now.
        """
