"""Keeps a cluster's single parts running: the embedded Redis, the router, the controller.

`python -m kvhive.scripts.supervisor <state root> <cluster>`. A part that has ended is started again, where
clients and workers know it: with the same ports and password. One that keeps ending is started less and
less often. The workers need none of the three to live: Ray restarts them, and they publish what they hold to
a Redis that comes back empty.

It depends on little and does little, so that it lives. If it ends all the same, nothing else does, and the
next `kvhive up` starts another one.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from kvhive.proto.errors import KvhiveError
from kvhive.scripts.cluster_state import ClusterState, StateFolder
from kvhive.scripts.detached_process import launch_module
from kvhive.scripts.owned_processes import ProcessId, identify, is_alive

log = logging.getLogger(__name__)

POLL_S = 0.3
PAUSE_FIRST_S, PAUSE_LONGEST_S = 0.5, 30.0
"""Before a part is started again, twice as long each time ..."""
STABLE_S = 60.0
"""... until it has run for so long."""
MOST_UNNAMED = 17
"""A supervisor that the state does not name at so many looks, some 5 s, leaves: the cluster is gone, or
another one's. They are counted, not timed, or a machine that had no time for it would end it."""
_LOG = "supervisor.log"


@dataclass(slots=True)
class Part:
    """One process that is kept running."""

    name: str
    """Its field in ClusterState."""
    launch: Callable[[ClusterState], ProcessId | None]
    pause_s: float = PAUSE_FIRST_S
    due_at: float = 0.0
    """When it may be started again; 0: it runs."""
    started_at: float = 0.0
    unsaved: ProcessId | None = None
    """It runs, and the state could not be written; here, so that there is never a second one."""

    def look(self, state: ClusterState, now: float) -> ProcessId | None:
        """Start it again when it has ended and its pause is over; return what is to be saved. May raise."""
        process: ProcessId | None = self.unsaved or getattr(state, self.name)
        if is_alive(process):
            self.due_at = 0.0
            if now - self.started_at > STABLE_S:
                self.pause_s = PAUSE_FIRST_S
            return self.unsaved
        self.unsaved = None
        if not self.due_at:
            log.warning("ended part=%s; again in %.1f s", self.name, self.pause_s)
            self.due_at = now + self.pause_s
            self.pause_s = min(2 * self.pause_s, PAUSE_LONGEST_S)
        if now < self.due_at:
            return None
        self.due_at, self.started_at = 0.0, now
        return self.launch(state)


def launch_supervisor(runtime_dir: Path, folder: StateFolder) -> ProcessId | None:
    """Start a supervisor; it waits until the state names it."""
    process = launch_module(
        "kvhive.scripts.supervisor", str(folder.root), folder.cluster, log=runtime_dir / _LOG
    )
    return identify(process.pid)


def supervise(
    folder: StateFolder,
    parts: list[Part],
    myself: ProcessId | None,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Look after the parts until the cluster is not this process' to look after."""
    unnamed = 0
    while unnamed < MOST_UNNAMED:
        unnamed = 0 if supervise_once(folder, parts, myself, clock()) else unnamed + 1
        sleep(POLL_S)
    log.info("leaving: no state of cluster %s names this supervisor", folder.cluster)


def supervise_once(folder: StateFolder, parts: list[Part], myself: ProcessId | None, now: float) -> bool:
    """Look after each part once; False when the cluster is not this process' to look after."""
    state = folder.load()
    if state is None or state.supervisor != myself:
        return state is not None and not state.ready  # a start under way may name it yet
    for part in parts:
        if part.name == "redis" and state.redis is None:
            continue  # it is the operator's
        try:
            process = part.look(state, now)
        except (KvhiveError, OSError, ValueError) as error:
            log.error("not started part=%s error=%s", part.name, error)
            continue
        if process is not None:
            state = _note(folder, state, part, process)
    return True


def _note(folder: StateFolder, state: ClusterState, part: Part, process: ProcessId) -> ClusterState:
    """Write down that a part runs again; on a full disk that is done in a later round."""
    restarts = {**state.restarts, part.name: state.restarts.get(part.name, 0) + 1}
    changes: dict[str, Any] = {part.name: process, "restarts": restarts}
    try:
        state = folder.save(replace(state, **changes))
    except OSError as error:
        if part.unsaved is None:
            log.error("started part=%s pid=%d, not written down: %s", part.name, process.pid, error)
        part.unsaved = process
        return state
    part.unsaved = None
    log.warning("started part=%s pid=%d", part.name, process.pid)
    return state


def _parts() -> list[Part]:
    children: list[subprocess.Popen[bytes]] = []

    def child(process: subprocess.Popen[bytes]) -> ProcessId | None:
        children[:] = [each for each in children if each.poll() is None] + [process]
        return identify(process.pid)

    def redis(state: ClusterState) -> ProcessId | None:
        from kvhive.scripts.embedded_redis import relaunch

        return child(relaunch(Path(state.runtime_dir) / "redis"))

    def router(state: ClusterState) -> ProcessId | None:
        from kvhive.scripts.router_process import keep_ports, launch_router

        keep_ports(Path(state.runtime_dir), state.grpc, state.http)
        return child(launch_router(Path(state.runtime_dir)))

    def controller(state: ClusterState) -> ProcessId | None:
        from kvhive.scripts.controller_process import launch_controller

        return child(launch_controller(Path(state.runtime_dir)))

    return [Part("redis", redis), Part("router", router), Part("controller", controller)]


def main(arguments: list[str]) -> int:
    """Supervise until the cluster is another's or gone; return the exit status."""
    logging.basicConfig(
        level=logging.INFO, format="time=%(asctime)s level=%(levelname)s at=%(name)s %(message)s"
    )
    if len(arguments) != 2:
        print("usage: python -m kvhive.scripts.supervisor <state root> <cluster>", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    folder, parts, myself = StateFolder(Path(arguments[0]), arguments[1]), _parts(), identify(os.getpid())
    try:
        supervise(folder, parts, myself, time.monotonic, time.sleep)
    except KvhiveError as error:
        print(f"supervisor: {error}", file=sys.stderr)
        return 1
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
