"""`kvhive explain`: why a request went where it did, as the router remembers it."""

from __future__ import annotations

import json

import click
from google.protobuf.json_format import MessageToDict

from kvhive.client import ONCE, Client
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts.cluster_access import callers_key
from kvhive.scripts.cluster_state import ClusterState


def run(state: ClusterState, request_id: str, as_json: bool) -> None:
    """Ask and print. Raises KvhiveError."""
    with Client(state.grpc, api_key=callers_key(state), retry=ONCE) as client:
        decisions = client.explain(request_id)
    if as_json:
        rows = [
            MessageToDict(each, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            for each in decisions
        ]
        click.echo(json.dumps({"decisions": rows}))
        return
    for decision in decisions:
        click.echo("\n".join(lines(decision)))


def lines(decision: pb.RouteDecision) -> list[str]:
    """Return one decision for people."""
    found = f"{decision.cached_tokens} cached" if decision.HasField("cached_tokens") else "not begun"
    moved = f", after {decision.moves} others" if decision.moves else ""
    pull = f", pulling from {decision.pull_from}" if decision.pull_from else ""
    why = f"{decision.reason}{moved}{pull}"
    rows = [
        f"{decision.request_id}, {decision.age_s:.1f} s ago: to {decision.worker_id} ({why})",
        f"  prompt {decision.prompt_tokens} tokens, {decision.reachable_tokens} reachable, {found}; "
        f"first token expected after {decision.predicted_ttft_s * 1000:.0f} ms",
        "  worker      held  coming    cost ms = queue + room + price x compute + decode",
    ]
    for each in decision.candidates:
        computing = f"{each.price:.2f} x {_ms(each.compute_s)}"
        terms = f"{_ms(each.queue_s)} + {_ms(each.room_s)} + {computing} + {_ms(each.decode_s)}"
        held = f"{each.worker_id:<8} {each.matched_tokens:>7} {each.expected_tokens:>7}"
        rows.append(f"  {held} {_ms(each.cost_s):>10} = {terms}")
    rows += [f"  {worker_id}: {why}" for worker_id, why in sorted(decision.excluded.items())]
    return rows


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"
