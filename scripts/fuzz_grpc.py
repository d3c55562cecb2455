"""Call a router's gRPC door with made-up messages: `scripts/fuzz_grpc --cases 5000`.

Without a HOST:PORT a router of our own before simulated workers is called. Whatever is sent, each call must
end, with an answer or a status that is not INTERNAL or UNKNOWN; afterwards nothing may be left at the router
or in a pool. The exit status is 1 where that does not hold; each case that failed is named by its seed and
number, which make it again. One in five streams is left in the middle.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import click
import grpc

from kvhive.client.connection import key_metadata
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.scripts.bench_proxy_rig import running_rig
from kvhive.scripts.fuzz_messages import random_call

DEADLINE_S = 300.0
"""A call that takes longer hangs. Workers keep a prompt for a minute that waits for what pins keep."""
IDLE_WITHIN_S = 30.0
LEFT_SHARE = 0.2
CALLS_AT_ONCE = 16
MAX_CONTEXT = 512
"""Of a simulated model: who names no max_tokens is not to wait for thousands."""
NEVER = {"INTERNAL", "UNKNOWN", "DATA_LOSS", "DEADLINE_EXCEEDED"}
"""Statuses that are never an answer to a caller's mistake; the last is our own deadline."""

Key: TypeAlias = tuple[tuple[str, str], ...]
"""What shows the caller's API key; empty: nothing."""

_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]


@dataclass(slots=True)
class Outcome:
    """What came of all cases."""

    statuses: Counter[str] = field(default_factory=Counter)
    """`Method STATUS` -> how often."""
    refused: Counter[str] = field(default_factory=Counter)
    """Fields of invalid requests -> how often. Where all are refused for one, nothing is seen of others."""
    failures: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What was not idle at the end."""


async def fuzz(target: str, cases: int, seed: int, only: int | None = None, api_key: str = "") -> Outcome:
    """Send so many cases, or only one of them."""
    key = key_metadata(api_key)
    outcome, numbers = Outcome(), iter(range(cases) if only is None else [only])
    async with grpc.aio.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:

        async def caller() -> None:
            for number in numbers:
                await _case(channel, key, (seed, number), outcome)

        await asyncio.gather(*(caller() for _ in range(CALLS_AT_ONCE)))
        outcome.left = await left(inference_pb2_grpc.InferenceStub(channel), key)
    return outcome


async def _case(channel: grpc.aio.Channel, key: Key, case: tuple[int, int], outcome: Outcome) -> None:
    seed, number = case
    chance = random.Random(f"{seed}/{number}")
    # Generate is most of what there is to get wrong.
    methods = list(_SERVICE.methods)
    method = chance.choice([*methods, *[m for m in methods if m.name == "Generate"] * len(methods)])
    raw = random_call(method.input_type, chance)
    path = f"/{_SERVICE.full_name}/{method.name}"
    if method.server_streaming:
        leave_after = chance.randrange(4) if chance.random() < LEFT_SHARE else None
        status, what = await _stream(channel.unary_stream(path), raw, key, leave_after)
    else:
        status, what = await _single(channel.unary_unary(path), raw, key)
    outcome.statuses[f"{method.name} {status}"] += 1
    if status == "INVALID_ARGUMENT":
        outcome.refused[re.sub(r"\[.*?\]", "", what.partition(":")[0])[:80]] += 1
    if status in NEVER:
        outcome.failures.append(f"seed {seed}, case {number}, {method.name}: {status} {what}")


async def _single(method: Any, raw: bytes, key: Key) -> tuple[str, str]:
    try:
        await method(raw, timeout=DEADLINE_S, metadata=key)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


async def _stream(method: Any, raw: bytes, key: Key, leave_after: int | None) -> tuple[str, str]:
    call = method(raw, timeout=DEADLINE_S, metadata=key)
    seen, last = 0, b""
    try:
        while leave_after is None or seen < leave_after:
            last_read = await call.read()
            if last_read is grpc.aio.EOF:
                finished = pb.GenerateResponse.FromString(last).HasField("finished")
                return ("OK", "") if finished else ("UNKNOWN", "it ended without an end")
            seen, last = seen + 1, last_read
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    call.cancel()
    return "left", ""


async def left(stub: inference_pb2_grpc.InferenceStub, key: Key) -> list[str]:
    """Wait until all is idle, and say what is not."""
    until = asyncio.get_running_loop().time() + IDLE_WITHIN_S
    while True:
        busy = _busy(await stub.GetCluster(pb.GetClusterRequest(audit=True), metadata=key))
        if not busy or asyncio.get_running_loop().time() > until:
            return busy
        await asyncio.sleep(0.2)


def _busy(cluster: pb.GetClusterResponse) -> list[str]:
    found = []
    for worker in cluster.workers:
        blocks = worker.blocks
        if blocks.live or worker.running or worker.waiting:
            found.append(
                f"{worker.id}: {blocks.live} live blocks, {worker.running} running, {worker.waiting} waiting"
            )
        if blocks.live + blocks.cached + blocks.free != blocks.total:
            found.append(f"{worker.id}: its blocks do not add up")
    audit, router = cluster.audit, cluster.router
    for name in ("placed_requests", "open_requests"):
        if getattr(audit, name):
            found.append(f"router: {getattr(audit, name)} {name}")
    if router.in_flight or router.held:
        found.append(f"router: {router.in_flight} in flight, {router.held} held")
    return found


@click.command()
@click.argument("target", default="")
@click.option("--cases", type=click.IntRange(1), default=5000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--only", type=int, help="One case, by its number.")
@click.option("--api-key", envvar="KVHIVE_API_KEY", default="", help="An admin's, where keys are needed.")
def main(target: str, cases: int, seed: int, only: int | None, api_key: str) -> None:
    """Fuzz the router at TARGET (host:port), or one of our own."""
    with contextlib.ExitStack() as stack:
        if not target:
            rig = stack.enter_context(running_rig(2, 0.0, max_context=MAX_CONTEXT, simulated=True))
            target = rig.grpc
        outcome = asyncio.run(fuzz(target, cases, seed, only, api_key))
    for line in outcome.failures + outcome.left:
        click.echo(line, err=True)
    counts = {"statuses": outcome.statuses, "refused": dict(outcome.refused.most_common())}
    click.echo(json.dumps({"cases": cases, "failures": len(outcome.failures), **counts}, indent=1))
    sys.exit(1 if outcome.failures or outcome.left else 0)


if __name__ == "__main__":
    main()
