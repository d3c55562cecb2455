"""`kvhive status`: one document for programs, and the same as a table for people."""

from __future__ import annotations

from typing import Any

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts.cluster_state import ClusterState

_COLUMNS = (
    ("WORKER", "id"),
    ("STATE", "state"),
    ("DEVICE", "device"),
    ("RUN", "running"),
    ("WAIT", "waiting"),
    ("LIVE", "live"),
    ("CACHED", "cached"),
    ("FREE", "free"),
    ("HIT", "hit"),
    ("PULLED", "pulled"),
    ("ACCEPT", "accept"),
    ("ADDRESS", "address"),
    ("EPOCH", "epoch"),
)


def status_document(state: ClusterState, cluster: pb.GetClusterResponse) -> dict[str, Any]:
    """Return what `kvhive status --json` prints."""
    index = cluster.index
    return {
        "cluster": state.cluster,
        "model": cluster.model,
        "version": cluster.version,
        "endpoints": {"grpc": state.grpc, "http": state.http},
        "router": {"pid": state.router.pid if state.router else None},
        "redis": {"embedded": state.redis is not None, "pid": state.redis.pid if state.redis else None},
        "ray": {"address": state.ray.address, "owned": state.ray.owned} if state.ray else None,
        "runtime_dir": state.runtime_dir,
        "index": {name: getattr(index, name) for name in ("staleness_s", "blocks", "resyncs", "connected")},
        "workers": [_worker(worker) for worker in cluster.workers],
    }


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
        "",
        *(line.rstrip() for line in table),
    ]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _worker(worker: pb.WorkerInfo) -> dict[str, Any]:
    plain = {f.name: getattr(worker, f.name) for f in worker.DESCRIPTOR.fields if f.name != "blocks"}
    blocks = worker.blocks
    return {**plain, "blocks": {name: getattr(blocks, name) for name in ("total", "live", "cached", "free")}}
