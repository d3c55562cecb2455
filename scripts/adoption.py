"""What `kvhive up` does with a cluster that was started before: keep what lives, start again what does not.

As long as Ray runs its workers a cluster is worth keeping, whatever else has ended; without Ray nothing of it
serves, and it is cleaned away. It is never started a second time beside itself.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from kvhive.client import ONCE, Client
from kvhive.proto.errors import ClusterError, KvhiveError
from kvhive.scripts.cluster_access import operators_key
from kvhive.scripts.cluster_state import ClusterState, StateFolder
from kvhive.scripts.control_socket import ask
from kvhive.scripts.owned_processes import RUNTIME_DIR_VARIABLE, is_alive
from kvhive.scripts.progress import Progress
from kvhive.scripts.ray_driver import answers
from kvhive.scripts.supervisor import launch_supervisor

BACK_TIMEOUT_S = 120.0
"""For the supervisor to bring everything back on a busy machine."""
_POLL_S = 0.2


def can_adopt(state: ClusterState) -> bool:
    """Whether a cluster came up once, and its Ray still runs."""
    if not state.ready or state.ray is None:
        return False
    return is_alive(state.ray.head) if state.ray.owned else answers(state.ray.address)


def adopt(folder: StateFolder, state: ClusterState, report: Progress) -> list[str]:
    """See to it that all parts run; return the names of those that did not. The folder's lock is held.

    Raises ClusterError when they do not come back.
    """
    lost = [name for name in ("supervisor", "controller", "router") if not is_alive(getattr(state, name))]
    if state.redis is not None and not is_alive(state.redis):
        lost.append("redis")
    if "supervisor" in lost:
        os.environ[RUNTIME_DIR_VARIABLE] = state.runtime_dir
        report("supervisor", "starting another one")
        supervisor = launch_supervisor(Path(state.runtime_dir), folder)
        folder.save(replace(state, supervisor=supervisor))
    deadline = time.monotonic() + BACK_TIMEOUT_S
    while missing := _missing(folder.load() or state):
        report("parts", f"waiting for {missing}")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"cluster {state.cluster!r} has lost its {missing}, which did not come back within "
                f"{BACK_TIMEOUT_S:g} s: see the logs in {state.runtime_dir}, or run `kvhive down`"
            )
        time.sleep(_POLL_S)
    return lost


def _missing(state: ClusterState) -> str:
    """Name the first part that does not answer; empty when all do."""
    if state.redis is not None and not is_alive(state.redis):
        return "redis"
    try:
        with Client(state.grpc, api_key=operators_key(state), retry=ONCE) as client:
            client.cluster()
    except KvhiveError:
        return "router"
    try:
        ask(Path(state.runtime_dir), {"do": "fleet"})
    except KvhiveError:
        return "controller"
    return ""
