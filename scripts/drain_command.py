"""`kvhive drain` and `kvhive scale`: ask the controller, and show how far it is."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from kvhive.proto.errors import ClusterError
from kvhive.scripts.cluster_state import ClusterState
from kvhive.scripts.control_socket import ask
from kvhive.scripts.progress import show_progress

_POLL_S = 0.3
_AWAY_S = 90.0
"""Longest that a controller may be away while its supervisor starts another one."""


def run_drain(state: ClusterState, worker: str, timeout_s: float, hand_over: bool, as_json: bool) -> None:
    """Drain a worker and return when it is gone. Raises ClusterError."""
    runtime_dir = Path(state.runtime_dir)
    order = {"do": "drain", "worker": worker, "timeout_s": float(timeout_s), "hand_over": hand_over}
    asked = ask(runtime_dir, order, timeout_s=30.0)
    with show_progress(sys.stderr) as report:
        ended = _follow(runtime_dir, worker, report)
    if as_json:
        click.echo(json.dumps({"worker": worker, "wanted": asked["wanted"], **ended}))
        return
    if ended:
        click.echo(_summary(worker, ended))
    else:
        click.echo(f"worker {worker} is gone; it did not serve")
    if asked["autoscaling"]:
        click.echo("autoscaling decides whether another one comes (`autoscaling.min_workers`)")
    else:
        count = asked["wanted"]
        click.echo(f"the cluster keeps {_workers(count)} from now on (`kvhive scale {count + 1}` adds one)")


def run_scale(state: ClusterState, wanted: int, as_json: bool) -> None:
    """Set how many workers there are to be; they come and go by themselves. Raises ClusterError."""
    answer = ask(Path(state.runtime_dir), {"do": "scale", "workers": wanted}, timeout_s=30.0)
    if as_json:
        click.echo(json.dumps(answer))
        return
    before = answer["before"]
    click.echo(
        f"the cluster is to have {_workers(wanted)}, had {before} (`kvhive status` shows how far it is)"
        if before != wanted
        else f"the cluster has {_workers(wanted)} already"
    )


def _follow(runtime_dir: Path, worker: str, report: Any) -> dict[str, Any]:
    """Show a drain until it is over; return how it ended, empty for a worker that did not serve."""
    heard_at, last = time.monotonic(), dict[str, Any]()
    while True:
        try:
            fleet = ask(runtime_dir, {"do": "fleet"})
            heard_at = time.monotonic()
        except ClusterError:
            if time.monotonic() - heard_at > _AWAY_S:
                raise
            report(worker, "the controller is away")
            time.sleep(_POLL_S)
            continue
        if worker in fleet["drained"]:
            ended: dict[str, Any] = fleet["drained"][worker]
            return ended
        if worker in fleet["drains"]:
            last = fleet["drains"][worker]
            report(worker, _line(last))
        elif all(each["id"] != worker for each in fleet["workers"]):
            return last
        time.sleep(_POLL_S)


def _line(progress: dict[str, Any]) -> str:
    handed = progress["handed"]
    parts = [progress["step"]]
    if handed["blocks"]:
        parts.append(f"{handed['blocks_done']} of {handed['blocks']} hot blocks handed over")
    if progress["open_requests"]:
        parts.append(f"{progress['open_requests']} streams")
    return ", ".join(parts)


def _summary(worker: str, ended: dict[str, Any]) -> str:
    handed, moved = ended["handed"], ended["moved_requests"]
    said = [f"worker {worker} is gone"]
    said.append(f"{handed['blocks_done']} of {handed['blocks']} hot blocks are at other workers")
    if moved:
        said.append(f"{moved} streams moved")
    said += [note for note in (ended["note"], handed["error"]) if note]
    return "; ".join(said)


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"
