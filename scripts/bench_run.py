"""Sends workloads to targets, turn by turn, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvhive.scripts.bench_client import BenchClient, Timing
from kvhive.scripts.bench_workloads import WARM_UP, Ask, TokenRange, Workload, workload


@dataclass(frozen=True, slots=True)
class Target:
    """One server that is measured."""

    name: str
    url: str
    """Without `/v1`."""
    model: str
    about: dict[str, Any]
    """What it says of itself: version, model."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured."""

    workloads: tuple[str, ...]
    runs: int
    seed: str
    ids: TokenRange
    timeout_s: float
    """Longest one request may take."""
    pause_s: float = 0.0
    """Before each run: threads of the target before may go on looking for work for a while."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """One workload sent once to one target."""

    workload: str
    run: int
    target: str
    wall_s: float
    """From the first request sent to the last one ended."""
    load: tuple[float, float, float]
    """The machine's load averages when it began."""
    client_cpu_s: float
    """What the client itself used of the processor meanwhile."""
    requests: tuple[Timing, ...]

    @property
    def failures(self) -> int:
        """How many requests did not get what they asked for."""
        return sum(1 for request in self.requests if request.error)

    def metrics(self) -> dict[str, float | None]:
        """Return the run's figures by METRICS, over the requests that went well; None where there is none."""
        done = [request for request in self.requests if not request.error]
        firsts = [1000 * request.news_s[0] for request in done]
        gaps = [1000 * (b - a) for r in done for a, b in zip(r.news_s, r.news_s[1:], strict=False)]
        output = sum(request.completion_tokens for request in done)
        cached = [request.cached_tokens for request in done if request.cached_tokens is not None]
        return {
            "output_tok_s": output / self.wall_s if done else None,
            "total_tok_s": (output + sum(r.prompt_tokens for r in done)) / self.wall_s if done else None,
            "ttft_p50_ms": percentile(firsts, 50),
            "ttft_p99_ms": percentile(firsts, 99),
            "gap_p50_ms": percentile(gaps, 50),
            "gap_p99_ms": percentile(gaps, 99),
            "cached_tokens": float(sum(cached)) if cached else None,
        }


METRICS = (
    "output_tok_s",
    "total_tok_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "gap_p50_ms",
    "gap_p99_ms",
    "cached_tokens",
)
"""TTFT: from sending a request to its first piece of output; gap: between two pieces of one request."""


def percentile(values: Sequence[float], rank: float) -> float | None:
    """Return the smallest value that `rank` percent do not exceed (nearest rank); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * rank / 100) - 1)]


def median(values: Sequence[float | None]) -> float | None:
    """Return the median of what is there; None of nothing."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


async def measure(
    targets: Sequence[Target],
    plan: Plan,
    clock: Callable[[], float],
    report: Callable[[RunResult], None],
) -> list[RunResult]:
    """Warm every target up, then run every workload `runs` times on each; return the runs in order.

    In each run all targets get the same prompts, new to all of them; every other run goes through the
    targets backwards, so that none is always the first.
    """
    clients = {t.name: BenchClient(t.url, t.model, plan.timeout_s, clock) for t in targets}
    for target in targets:
        await send(workload(WARM_UP, plan.seed, plan.ids), clients[target.name].complete)
    results = []
    for run in range(plan.runs):
        for name in plan.workloads:
            work = workload(name, f"{plan.seed}/{run}", plan.ids)
            for target in targets if run % 2 == 0 else reversed(targets):
                await asyncio.sleep(plan.pause_s)
                load, cpu_s, began = os.getloadavg(), _cpu_s(), clock()
                timings = await send(work, clients[target.name].complete)
                wall_s, cpu_s = clock() - began, _cpu_s() - cpu_s
                results.append(RunResult(name, run, target.name, wall_s, load, cpu_s, tuple(timings)))
                report(results[-1])
    return results


async def send(work: Workload, complete: Callable[[Ask], Awaitable[Timing]]) -> list[Timing]:
    """Send all requests in order, `concurrency` at a time, and return how each went."""
    timings: list[Timing] = [Timing() for _ in work.asks]
    waiting = iter(enumerate(work.asks))

    async def one_after_another() -> None:
        for index, ask in waiting:
            timings[index] = await complete(ask)

    async with asyncio.TaskGroup() as group:
        for _ in range(work.concurrency):
            group.create_task(one_after_another())
    return timings


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
