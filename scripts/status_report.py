"""`kvhive status`: one document for programs, and the same as a table for people."""

from __future__ import annotations

from typing import Any

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts.cluster_state import ClusterState
from kvhive.scripts.owned_processes import is_alive

_COLUMNS = (
    ("WORKER", "id"),
    ("STATE", "state"),
    ("DEVICE", "device"),
    ("RUN", "running"),
    ("WAIT", "waiting"),
    ("LIVE", "live"),
    ("CACHED", "cached"),
    ("FREE", "free"),
    ("PINNED", "pinned"),
    ("HIT", "hit"),
    ("PULLED", "pulled"),
    ("ACCEPT", "accept"),
    ("ADDRESS", "address"),
    ("EPOCH", "epoch"),
)

_FLEET = "wanted", "autoscaling", "reason", "free", "drains", "drained"
_NOT_YET = "pending", "starting", "warming", "failed", "dead"


def status_document(
    state: ClusterState, cluster: pb.GetClusterResponse, fleet: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what `kvhive status --json` prints. `fleet` is the controller's document; None: it is away."""
    index = cluster.index
    workers = {worker.id: _worker(worker) for worker in cluster.workers}
    for known in fleet["workers"] if fleet else ():
        worker = workers.setdefault(known["id"], {**_worker(pb.WorkerInfo(id=known["id"])), "state": ""})
        worker["state"] = worker["state"] or known["stage"]
        worker["detail"] = known["detail"]
    return {
        "cluster": state.cluster,
        "model": cluster.model,
        "version": cluster.version,
        "endpoints": {"grpc": state.grpc, "http": state.http},
        "router": {"pid": state.router.pid if state.router else None},
        "controller": {
            "pid": state.controller.pid if state.controller else None,
            "answers": fleet is not None,
        },
        "supervisor": {
            "pid": state.supervisor.pid if state.supervisor else None,
            "runs": is_alive(state.supervisor),
        },
        "restarts": dict(state.restarts),
        "fleet": {key: fleet[key] for key in _FLEET} if fleet else None,
        "redis": {"embedded": state.redis is not None, "pid": state.redis.pid if state.redis else None},
        "ray": {"address": state.ray.address, "owned": state.ray.owned} if state.ray else None,
        "runtime_dir": state.runtime_dir,
        "index": {name: getattr(index, name) for name in ("staleness_s", "blocks", "resyncs", "connected")},
        "workers": [workers[worker_id] for worker_id in sorted(workers)],
    }


def _fleet_lines(document: dict[str, Any]) -> list[str]:
    """Say how many workers there are to be, and what those do that do not serve yet."""
    fleet = document["fleet"]
    if fleet is None:
        return ["controller away: the number of workers stays as it is"]
    how = f"autoscaling: {fleet['reason']}" if fleet["autoscaling"] else fleet["reason"]
    lines = [f"workers wanted {fleet['wanted']} ({how})"]
    for worker in document["workers"]:
        if worker["state"] in _NOT_YET:
            lines.append(f"  {worker['id']} {worker['state']}: {worker['detail']}")
    if fleet["free"]:
        lines.append(f"  Ray's free resources: {fleet['free']}")
    return lines


def status_lines(document: dict[str, Any]) -> list[str]:
    """Return the table for people, as lines without control characters."""
    rows = [[title for title, _ in _COLUMNS]]
    for worker in document["workers"]:
        shares = {
            "hit": _share(worker["prefix_hit_tokens"], worker["prefix_query_tokens"]),
            "pulled": _share(worker["pulled_tokens"], worker["prefix_query_tokens"]),
            "accept": _share(worker["accepted_tokens"], worker["drafted_tokens"]),
        }
        values = {**worker, **worker["blocks"], **shares}
        if not worker["routable"] and worker["state"] == "serving":
            values["state"] = "cooling"
        rows.append([str(values[key]) for _, key in _COLUMNS])
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    index, endpoints = document["index"], document["endpoints"]
    link = "connected" if index["connected"] else "not connected"
    return [
        f"cluster {document['cluster']}  model {document['model']}",
        f"gRPC {endpoints['grpc']}  HTTP {endpoints['http']}",
        f"index {link}, {index['blocks']} blocks, {index['staleness_s']:.1f} s old",
        *_fleet_lines(document),
        "",
        *(line.rstrip() for line in table),
    ]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _worker(worker: pb.WorkerInfo) -> dict[str, Any]:
    plain = {f.name: getattr(worker, f.name) for f in worker.DESCRIPTOR.fields if f.name != "blocks"}
    blocks = worker.blocks
    return {
        **plain,
        "detail": "",
        "blocks": {name: getattr(blocks, name) for name in ("total", "live", "cached", "free", "pinned")},
    }
