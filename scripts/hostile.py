"""What hostile clients cost those who mean well: a router as `kvhive up` runs it, and no model.

    python -m kvhive.scripts.hostile --json

Streams run all the time. Their times between two tokens while one attack goes on (from a process of its own)
are set beside those of the peace just before it, so that what the machine does meanwhile counts for both. At
the end the router must hold nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import grpc.aio

from kvhive.client.connection import key_metadata
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.auth.cluster_secret import operator_key
from kvhive.scripts.bench_proxy_rig import Rig, running_rig
from kvhive.scripts.hostile_attacks import ATTACKS

STREAM_TOKENS = 400
IDLE_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Gaps:
    """Seconds between two tokens of a stream, of all streams."""

    seconds: list[float] = field(default_factory=list)

    def p99_ms(self) -> float:
        """Return the 99th percentile."""
        gaps = sorted(self.seconds)
        return gaps[int(0.99 * (len(gaps) - 1))] * 1e3 if gaps else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One attack."""

    attack: str
    p99_peace_ms: float
    p99_ms: float
    p99_ratio: float
    failed_streams: int
    rss_mib: float
    """Of the router, at the end of it."""


class Witnesses:
    """Streams that mean well, one after another on each of some connections."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.gaps = Gaps()
        """Where gaps are noted now."""
        self.failed = 0

    async def run(self, streams: int) -> None:
        """Go on until cancelled."""
        await asyncio.gather(*(self._stream(number) for number in range(streams)))

    async def _stream(self, number: int) -> None:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[number + 1, 2, 3]))
        request.sampling.max_tokens, request.sampling.ignore_eos = STREAM_TOKENS, True
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._target, options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            while True:
                last = 0.0
                try:
                    async for response in stub.Generate(request):
                        now = time.perf_counter()
                        if last and response.HasField("delta"):
                            self.gaps.seconds.append(now - last)
                        last = now
                except grpc.aio.AioRpcError:
                    self.failed += 1
                    await asyncio.sleep(0.1)


@contextlib.contextmanager
def _attacking(name: str, rig: Rig) -> Iterator[None]:
    command = [sys.executable, "-P", "-m", "kvhive.scripts.hostile_attacks", name, rig.http, rig.grpc]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def _measure(rig: Rig, names: Sequence[str], seconds: float, streams: int) -> list[Outcome]:
    witnesses, outcomes = Witnesses(rig.grpc), []
    running = asyncio.create_task(witnesses.run(streams))
    try:
        await asyncio.sleep(seconds / 2)  # until all streams run
        for name in names:
            peace = witnesses.gaps = Gaps()
            await asyncio.sleep(seconds)
            failed = witnesses.failed
            with _attacking(name, rig):
                await asyncio.sleep(1.0)  # its process has to start
                attacked = witnesses.gaps = Gaps()
                await asyncio.sleep(seconds)
                rss = _rss_mib(rig.router_pid)
            ratio = attacked.p99_ms() / peace.p99_ms() if peace.seconds else 0.0
            lost = witnesses.failed - failed
            outcomes.append(Outcome(name, peace.p99_ms(), attacked.p99_ms(), ratio, lost, rss))
            click.echo(f"{name:14} p99 x{ratio:.2f}  failed {lost}  rss {rss:.0f} MiB", err=True)
            await asyncio.sleep(1.0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return outcomes


async def _left_behind(rig: Rig) -> dict[str, int]:
    """Return what the router still holds when all are gone; zeros, or what there was after a minute."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    async with grpc.aio.insecure_channel(rig.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        while True:
            request, metadata = pb.GetClusterRequest(audit=True), key_metadata(operator_key(rig.token))
            answer: pb.GetClusterResponse = await stub.GetCluster(request, metadata=metadata)
            live = sum(worker.blocks.live for worker in answer.workers)
            left = {
                "in_flight": answer.router.in_flight,
                "placed": answer.audit.placed_requests,
                "open": answer.audit.open_requests,
                "live_blocks": live,
            }
            if not any(left.values()) or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.5)


def _rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@click.command()
@click.option("--attack", "names", multiple=True, type=click.Choice(list(ATTACKS)), help="By default all.")
@click.option(
    "--seconds", type=click.FloatRange(1, 600), default=10, show_default=True, help="Of each phase."
)
@click.option("--streams", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option("--step-ms", type=click.FloatRange(1, 1000), default=20, show_default=True, help="Per token.")
@click.option("--json", "as_json", is_flag=True)
def main(names: tuple[str, ...], seconds: float, streams: int, step_ms: float, as_json: bool) -> None:
    """Attack a router of its own; the exit status is 1 where a stream failed or something was left behind."""
    with running_rig(1, step_ms / 1e3) as rig:
        before = _rss_mib(rig.router_pid)
        outcomes = asyncio.run(_measure(rig, names or tuple(ATTACKS), seconds, streams))
        left = asyncio.run(_left_behind(rig))
        after = _rss_mib(rig.router_pid)
    worst = max(outcome.p99_ratio for outcome in outcomes)
    result = {
        "attacks": [asdict(outcome) for outcome in outcomes],
        "worst_p99_ratio": worst,
        "rss_mib": {"before": before, "after": after},
        "left_behind": left,
    }
    click.echo(json.dumps(result) if as_json else f"worst p99 x{worst:.2f}, left behind: {left}")
    sys.exit(1 if any(left.values()) or any(outcome.failed_streams for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
