"""The controller as a child process: what it is told, how it is started, and when a start is over."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvhive.proto.errors import ClusterError
from kvhive.scripts.control_socket import ask, socket_path
from kvhive.scripts.detached_process import launch_module
from kvhive.scripts.log_tail import last_line
from kvhive.scripts.owned_processes import ProcessId, identify
from kvhive.scripts.ray_head import LONGEST_START_S

_BEGIN_TIMEOUT_S = 120.0
"""For imports and a connection to Ray, on a busy machine."""
_SPEC_TIMEOUT_S = LONGEST_START_S + 60.0
"""A Ray head that comes up at its last try is not to find the controller gone."""
_POLL_S = 0.1
_SPEC, _LOG = "controller.json", "controller.log"


@dataclass(frozen=True, slots=True)
class ControllerSpec:
    """Everything that a controller needs, in plain values."""

    config: dict[str, Any] = field(repr=False)
    """The mapping of `config.to_mapping`."""
    ray_address: str
    ray_token: str = field(repr=False)
    """Of a head of our own; empty: the environment has what Ray asks for."""
    redis_url: str = field(repr=False)
    cluster_token: str = field(repr=False)
    model_path: str
    model_name: str
    runtime_dir: str
    cores: int
    """As in Fleet."""

    def save(self, path: Path) -> None:
        """Write the spec for this user only, and whole: a controller may be waiting for it."""
        fresh = path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)
        os.replace(fresh, path)

    @classmethod
    def wait(cls, path: Path) -> ControllerSpec:
        """Read what `save` wrote, or is about to. Raises ClusterError when nobody does."""
        deadline = time.monotonic() + _SPEC_TIMEOUT_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise ClusterError(f"{path} was not there after {_SPEC_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        return cls(**json.loads(path.read_text()))


def launch_controller(runtime_dir: Path) -> subprocess.Popen[bytes]:
    """Start a controller of the spec in a runtime directory, there or to come, and wait for nothing."""
    return launch_module("kvhive.scripts.control", str(runtime_dir / _SPEC), log=runtime_dir / _LOG)


class FirstController:
    """The controller of a cluster's start, which makes its first workers.

    It begins with imports that take seconds, beside Ray's head, which takes seconds too.
    """

    def __init__(self, runtime_dir: Path, started: Callable[[ProcessId | None], None]) -> None:
        """Start it; `started` gets the process at once."""
        self._runtime_dir = runtime_dir
        self._process = launch_controller(runtime_dir)
        started(identify(self._process.pid))

    def tell(self, spec: ControllerSpec) -> None:
        """Let it go on: Ray and Redis are there."""
        spec.save(self._runtime_dir / _SPEC)

    def wait_begun(self) -> dict[str, Any]:
        """Wait until it has asked Ray what there is; return its document. Raises ClusterError."""
        deadline = time.monotonic() + _BEGIN_TIMEOUT_S
        while not socket_path(self._runtime_dir).exists():
            self._raise_if_ended()
            if time.monotonic() > deadline:
                raise ClusterError(f"no controller after {_BEGIN_TIMEOUT_S:g} s: {self._said()}")
            time.sleep(_POLL_S)
        return self._ask()

    def wait_serving(self, count: int, timeout_s: float, report: Callable[[str, str], None]) -> None:
        """Wait until `count` workers serve, reporting (worker, what it does) each time that changes.

        Raises ClusterError when one fails, or has not come up after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            document = self._ask()
            serving = {worker["id"] for worker in document["workers"] if worker["stage"] == "serving"}
            for worker in document["workers"]:
                report(worker["id"], worker["detail"])
                if worker["phase"] in ("failed", "stopped", "dead"):
                    raise ClusterError(f"worker {worker['id']}: {worker['detail']}")
            if len(serving) >= count:
                return
            if time.monotonic() > deadline:
                missing = [worker["id"] for worker in document["workers"] if worker["id"] not in serving]
                raise ClusterError(
                    f"after {timeout_s:g} s not serving: {', '.join(missing)} (workers.start_timeout_s); "
                    f"Ray's free resources: {document['free']}"
                )
            time.sleep(_POLL_S)

    def _ask(self) -> dict[str, Any]:
        self._raise_if_ended()
        return ask(self._runtime_dir, {"do": "fleet"}, timeout_s=30.0)

    def _raise_if_ended(self) -> None:
        if self._process.poll() is not None:
            raise ClusterError(f"the controller ended: {self._said()}")

    def _said(self) -> str:
        return last_line(self._runtime_dir / _LOG)
