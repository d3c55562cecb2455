"""`kvhive down`: end exactly what a cluster started, in order, and prove that nothing of it is left.

The router goes first, so that no new request meets a worker that is leaving; then the workers, Redis, Ray,
and whatever else carries the cluster's runtime directory in its environment.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from kvhive.proto.errors import ClusterError
from kvhive.scripts.cluster_state import ClusterState, StateFolder
from kvhive.scripts.owned_processes import ProcessId, end_processes, is_alive, processes_of
from kvhive.scripts.ray_driver import answers, connected

_REDIS_GRACE_S = 5.0
_RAY_GRACE_S = 15.0


def tear_down(folder: StateFolder, state: ClusterState, grace_s: float) -> list[str]:
    """Stop the cluster, giving running requests `grace_s` seconds; return what was done, a line each.

    Idempotent. Raises ClusterError when something of ours survives; its state is kept then.
    """
    done = []
    if _end(state.router, grace_s + 2.0):
        done.append("stopped the router")
    if line := _end_workers(state, grace_s):
        done.append(line)
    if _end(state.redis, _REDIS_GRACE_S):
        done.append("stopped the embedded Redis")
    if state.ray is not None and _end(state.ray.head, _RAY_GRACE_S):
        done.append("stopped the local Ray head")
    runtime_dir = Path(state.runtime_dir)
    left = end_processes(lambda: processes_of(runtime_dir), grace_s=2.0)
    if left:
        done.append(f"ended {left} more processes of this cluster")
    survivors = [process.pid for process in processes_of(runtime_dir)]
    if survivors:
        raise ClusterError(f"these processes of the cluster do not end: {survivors}")
    shutil.rmtree(runtime_dir, ignore_errors=True)
    folder.remove()
    return done


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let a tear-down finish: it is bounded, and a second Ctrl-C would leave processes behind."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _end(process: ProcessId | None, grace_s: float) -> bool:
    return process is not None and end_processes(lambda: [process], grace_s) > 0


def _end_workers(state: ClusterState, grace_s: float) -> str:
    """End the actors through Ray and say so; with a Ray head of our own they end with it in any case.

    Raises ClusterError when a Ray that is not ours is there but refuses: its workers would stay behind.
    """
    ray = state.ray
    if ray is None or not state.workers:
        return ""
    if ray.owned and not (is_alive(ray.head) and grace_s > 0):
        return ""
    if not ray.owned and not answers(ray.address):
        return f"Ray at {ray.address} is gone, and the workers with it"
    try:
        with connected(ray):
            from kvhive.scripts import worker_fleet  # brings ray, which must not be there before `connected`

            count = worker_fleet.stop_workers(state.cluster, state.workers, grace_s)
    except ClusterError as error:
        if not ray.owned:
            raise
        return f"could not ask the workers to stop ({error})"
    return f"stopped {count} workers"
