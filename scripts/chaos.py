"""`scripts/chaos`: load on a cluster whose parts are killed, frozen and cut off, and what came of it.

    learn the answers -> (load and faults -> heal -> look what is left) again and again -> report

Prints one object; the exit status is 1 when anything happened that never may (docs/chaos.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from kvhive.proto.errors import ClusterError
from kvhive.scripts import private_network
from kvhive.scripts.chaos_client import OutsideClient
from kvhive.scripts.chaos_cluster import MODEL, ClusterSize, chaos_cluster
from kvhive.scripts.chaos_faults import MOST_AT_ONCE, Faults
from kvhive.scripts.chaos_invariants import Invariants
from kvhive.scripts.chaos_link_faults import LinkFaults
from kvhive.scripts.chaos_load import Load, Tally
from kvhive.scripts.chaos_ray_cluster import ray_cluster
from kvhive.scripts.chaos_ray_faults import RayFaults
from kvhive.scripts.chaos_trouble import Trouble
from kvhive.scripts.chaos_victims import Cluster
from kvhive.scripts.chaos_work import make_work
from kvhive.scripts.progress import Progress, show_progress

EPISODE_S = 120.0
"""Load and faults for so long, and then a look at what is left while all is quiet."""
GAP_S, RAY_GAP_S = 1.2, 6.0
"""Between two faults: what Ray starts again takes seconds."""
MOST_THREADS = 4 * MOST_AT_ONCE
MOST_VIOLATING_EPISODES = 5
"""After so many in which something was wrong, a run ends: more would say the same."""


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """One run."""

    seconds: float
    seed: str
    per_second: float
    """Requests."""
    fault_gap_s: float
    """Seconds between two faults, on average."""
    kinds: int = 40
    """Different requests."""


class ChaosRun:
    """One run on a cluster that was just made."""

    def __init__(
        self, cluster: Cluster, plan: ChaosPlan, progress: Progress, trouble: Trouble, faults: Faults
    ) -> None:
        self._cluster = cluster
        self._plan = plan
        self._progress = progress
        self._clients = [OutsideClient(r.name, r.grpc, r.http) for r in cluster.routers]
        self._trouble = trouble
        work = make_work(plan.seed, plan.kinds, MODEL.vocabulary, MODEL.context)
        self._load = Load(self._clients, work, self._trouble, plan.seed)
        self._faults = faults
        self._invariants = Invariants(cluster, self._clients)
        self._told_to_stop = asyncio.Event()

    async def run(self) -> dict[str, Any]:
        """Do it all, or as much as there is time for before SIGINT or SIGTERM.

        Raises ClusterError, or RuntimeError where things are wrong without any fault.
        """
        loop, began = asyncio.get_running_loop(), time.monotonic()
        # Faults wait in threads, and connections look up addresses there: neither may wait for the other.
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS))

        def told_to_stop(number: signal.Signals) -> None:
            self._told_to_stop.set()
            loop.remove_signal_handler(number)  # the next one ends the process by itself

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told_to_stop, number)
        time_kept = asyncio.create_task(self._load.keep_time())
        try:
            self._progress("chaos", "starting")
            await self._cluster.start()
            self._progress("chaos", "learning the answers")
            await self._load.learn()
            await self._invariants.learn()
            began, episode, bad = time.monotonic(), 0, 0
            while (left := self._plan.seconds - (time.monotonic() - began)) > 0:
                episode += 1
                before = self._load.tally.violation_count
                await self._episode(episode, min(left, EPISODE_S))
                bad += self._load.tally.violation_count > before
                if bad >= MOST_VIOLATING_EPISODES or self._told_to_stop.is_set():
                    break
        finally:
            time_kept.cancel()
            for client in self._clients:
                await client.close()
            await self._cluster.end()
        return self._result(time.monotonic() - began)

    async def _episode(self, number: int, seconds: float) -> None:
        tally = self._load.tally
        load = asyncio.create_task(self._load.run(self._plan.per_second))
        faults = asyncio.create_task(self._faults.run(self._plan.fault_gap_s))
        until = time.monotonic() + seconds
        try:
            while (left := until - time.monotonic()) > 0 and not self._told_to_stop.is_set():
                told = f"{self._trouble.faults.total()} faults, {tally.requests} requests"
                self._progress("chaos", f"{told}, {tally.violation_count} violations")
                await asyncio.wait([load, faults], timeout=min(left, 1.0))
                for task in (load, faults):
                    if task.done():
                        task.result()  # a fault of this program's
        finally:
            for task in (faults, load):
                task.cancel()
            await asyncio.gather(faults, load, return_exceptions=True)
            await self._faults.heal()
        await self._load.drained()
        for failure in [*self._faults.failures, *await self._invariants.broken()]:
            tally.violated(f"at quiet {number}: {failure}")
        self._faults.failures.clear()

    def _result(self, took_s: float) -> dict[str, Any]:
        tally = {each.name: getattr(self._load.tally, each.name) for each in fields(Tally)}
        violations, count = tally.pop("violations"), tally.pop("violation_count")
        requests, answered = tally.pop("requests"), tally.pop("answered")
        return {
            "seed": self._plan.seed,
            "seconds": round(took_s, 1),
            "sentinel": self._cluster.redis.watcher is not None,
            "faults_by_kind": dict(sorted(self._trouble.faults.items())),
            "load": tally,
            "at_rest": self._invariants.most,
            "violation_list": violations,
            "faults": self._trouble.faults.total(),
            "requests": requests,
            "answered": answered,
            "answered_ratio": round(answered / requests, 5) if requests else None,
            "violations": count,
        }


def run_chaos(
    plan: ChaosPlan, size: ClusterSize, progress: Progress, logs: Path | None = None
) -> dict[str, Any]:
    """Make a cluster, strike it, and return what came of it. Raises ClusterError, RuntimeError."""
    trouble = Trouble()

    async def strike(cluster: Cluster, faults: Faults) -> dict[str, Any]:
        # Its clients belong to this event loop.
        result = await ChaosRun(cluster, plan, progress, trouble, faults).run()
        return {"ray": size.ray, "links": size.links, **result}

    if size.ray:
        with ray_cluster(size, logs) as on_ray:
            return asyncio.run(strike(on_ray, RayFaults(on_ray, trouble, plan.seed)))
    with chaos_cluster(size, logs) as bare:
        return asyncio.run(strike(bare, LinkFaults(bare, trouble, plan.seed)))


@contextmanager
def _shown(as_json: bool) -> Iterator[Progress]:
    if as_json:
        yield lambda subject, text: None
        return
    with show_progress(sys.stderr) as progress:
        yield progress


def _print(result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result))
        return
    for name, value in result.items():
        if name != "violation_list":
            click.echo(f"{name:16} {value}")
    for violation in result["violation_list"]:
        click.echo(f"violation: {violation}")


@click.command()
@click.option("--seconds", type=click.FloatRange(1, 86_400), default=60, show_default=True)
@click.option("--seed", default="", help="Same seed, same requests and dice; by default a new one.")
@click.option("--rate", type=click.FloatRange(0.1, 100), default=2, show_default=True, help="Requests/s.")
@click.option("--gap", type=click.FloatRange(0.05, 600), help="S to a fault; by default 1.2, on Ray 6.")
@click.option("--ray", is_flag=True, help="On Ray: controller and nodes are struck too; two routers.")
@click.option("--workers", type=click.IntRange(2, 16), default=3, show_default=True)
@click.option("--routers", type=click.IntRange(1, 8), default=2, show_default=True)
@click.option("--redis", type=click.Choice(["single", "sentinel"]), default="sentinel", show_default=True)
@click.option("--links/--no-links", default=None, help="Network namespaces; by default where possible.")
@click.option("--logs", type=click.Path(path_type=Path, exists=False), help="Say all; keep logs there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def main(
    seconds: float, seed: str, rate: float, gap: float | None, ray: bool, as_json: bool, **size: Any
) -> None:
    """Kill, freeze, restart and cut off the parts of a cluster under load, and check every answer."""
    level = logging.INFO if size["logs"] else logging.WARNING
    logging.basicConfig(level=level, format="time=%(asctime)s level=%(levelname)s at=%(name)s %(message)s")
    links = not ray and (private_network.possible() if size["links"] is None else size["links"])
    wanted = ClusterSize(size["workers"], size["routers"], size["redis"] == "sentinel", links, ray)
    plan = ChaosPlan(seconds, seed or secrets.token_hex(4), rate, gap or (RAY_GAP_S if ray else GAP_S))
    try:
        with _shown(as_json) as progress:
            result = run_chaos(plan, wanted, progress, size["logs"])
    except (ClusterError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    _print(result, as_json)
    sys.exit(1 if result["violations"] else 0)


if __name__ == "__main__":
    main()
