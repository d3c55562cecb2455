"""`kvhive down`: end exactly what a cluster started, in order, and prove that nothing of it is left.

What would start things again goes first. Then the router: it takes no new request and lets its streams end,
within the grace, on workers that still serve. Then the workers, Redis, Ray, and whatever else is ours by
owned_processes.py.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from kvhive.proto.errors import ClusterError
from kvhive.scripts.cluster_state import ClusterState, RaySession, StateFolder
from kvhive.scripts.fleet_memory import was_begun
from kvhive.scripts.owned_processes import ProcessId, end_processes, is_alive, processes_of
from kvhive.scripts.ray_driver import answers, connected
from kvhive.scripts.stop_grace import set_grace

_ROUTER_EXTRA_S = 10.0
"""Beyond the grace, for the router to cut streams off in order and close: SIGKILL is for a hung one."""
_REDIS_GRACE_S = 5.0
_CONTROL_GRACE_S = 5.0
_RAY_GRACE_S = 15.0
_REMOVE_TRIES, _REMOVE_PAUSE_S = 10, 0.2


def tear_down(folder: StateFolder, state: ClusterState, grace_s: float, forget: bool = False) -> list[str]:
    """Stop the cluster, giving running requests `grace_s` seconds; return what was done, a line each.

    Idempotent. Raises ClusterError when something of ours survives or cannot be asked; its state is kept
    then, unless `forget`: then what is left is said in a line and the state goes anyway.
    """
    done = []
    set_grace(Path(state.runtime_dir), grace_s)
    for part in (state.supervisor, state.controller):  # or what ends below would be started again
        _end(part, _CONTROL_GRACE_S)
    now = folder.load()
    if now is not None and now.runtime_dir == state.runtime_dir:
        state = now  # the supervisor may have started something again just before
    if _end(state.router, grace_s + _ROUTER_EXTRA_S):
        done.append("stopped the router")
    try:
        done += _end_workers(state, grace_s)
    except ClusterError as error:
        if not forget:
            raise
        done.append(f"forgot: {error}")
    if _end(state.redis, _REDIS_GRACE_S):
        done.append("stopped the embedded Redis")
    if state.ray is not None and _end(state.ray.head, _RAY_GRACE_S):
        done.append("stopped the local Ray head")
    runtime_dir = Path(state.runtime_dir)
    left = end_processes(lambda: processes_of(runtime_dir), grace_s=2.0)
    if left:
        done.append(f"ended {left} more processes of this cluster")
    survivors = [process.pid for process in processes_of(runtime_dir)]
    if survivors and not forget:
        raise ClusterError(f"these processes of the cluster do not end: {survivors}")
    if survivors:
        done.append(f"forgot: processes that do not end: {survivors}")
    _remove(runtime_dir)
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


def _remove(runtime_dir: Path) -> None:
    """Remove the runtime directory, also when something was still writing into it a moment ago."""
    for _ in range(_REMOVE_TRIES):
        shutil.rmtree(runtime_dir, ignore_errors=True)
        if not runtime_dir.exists():
            return
        time.sleep(_REMOVE_PAUSE_S)
    raise ClusterError(f"{runtime_dir} cannot be removed")


def _end(process: ProcessId | None, grace_s: float) -> bool:
    return process is not None and end_processes(lambda: [process], grace_s) > 0


def _end_workers(state: ClusterState, grace_s: float) -> list[str]:
    """End the actors through Ray and say so; with a Ray head of our own they end with it in any case.

    A start that was refused because Ray has workers of another cluster of that name has none to end.
    Raises ClusterError when a Ray that is not ours cannot be asked: its workers may be there still.
    """
    ray = state.ray
    if ray is None or not (state.workers or was_begun(Path(state.runtime_dir))):
        return []
    if not ray.owned:
        return [_stop_actors(state, ray, grace_s)]
    if grace_s > 0 and is_alive(ray.head):
        try:
            return [_stop_actors(state, ray, grace_s)]
        except ClusterError as error:
            return [f"could not ask the workers to stop ({error})"]
    return []


def _stop_actors(state: ClusterState, ray: RaySession, grace_s: float) -> str:
    if not ray.owned and not answers(ray.address):
        raise ClusterError(
            f"Ray at {ray.address} does not answer, so its workers {', '.join(state.workers)} may run on: "
            "repeat `kvhive down` when it is back, or give them up with `kvhive down --forget`"
        )
    with connected(ray):
        from kvhive.scripts import worker_fleet  # brings ray, which must not be there before `connected`

        count = worker_fleet.stop_workers(state.cluster, grace_s)
    return f"stopped {count} worker{'' if count == 1 else 's'}"
