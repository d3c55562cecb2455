"""`kvhive bench routing`: what a decision costs, beside what it costs elsewhere.

A peer runs in a process of its own, in the Python that has it; the two sides take turns, so that a busy
machine is busy for both, and ratios are medians over the rounds, each of a round's own two figures.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from kvhive.proto.errors import ClusterError
from kvhive.scripts import bench_routing_live, bench_routing_ours
from kvhive.scripts.bench_routing_ours import OurRouter
from kvhive.scripts.bench_routing_work import IndexWork

WORKERS = (8, 64, 512)
PROMPT_BLOCKS = (32, 512, 4096)
INDEX_BLOCKS = (100_000, 1_000_000)
LARGE_INDEX_BLOCKS = 10_000_000
SELECT_TOKENS = (500, 8_000, 32_000)
SELECT_WORKERS = 8
EVENT_BLOCKS = 200_000
MATCH = IndexWork(blocks=1_000_000, workers=64, prompt_blocks=512)
QUICK_BLOCKS = 20_000
PEER_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    rounds: int
    large: bool
    quick: bool
    """Small sizes, to see that all of it runs; the figures mean little."""

    @property
    def match(self) -> IndexWork:
        """The match that is compared."""
        return IndexWork(QUICK_BLOCKS, 8, 512) if self.quick else MATCH

    @property
    def events(self) -> IndexWork:
        """The events that are compared."""
        return IndexWork(QUICK_BLOCKS if self.quick else EVENT_BLOCKS, 8, 512)

    def table(self) -> list[IndexWork]:
        """Every cell of our own table."""
        if self.quick:
            return [IndexWork(QUICK_BLOCKS, workers, 32) for workers in (8, 512)]
        cells = [IndexWork(b, w, p) for b in INDEX_BLOCKS for w in WORKERS for p in PROMPT_BLOCKS]
        return [*cells, *(IndexWork(LARGE_INDEX_BLOCKS, w, 512) for w in WORKERS if self.large)]


class Peer:
    """ai-dynamo-runtime in another Python. A context manager."""

    def __init__(self, python: Path) -> None:
        folder = Path(__file__).parent
        self._command = [
            str(python),
            str(folder / "bench_routing_peer.py"),
            str(folder / "bench_routing_work.py"),
        ]

    def __enter__(self) -> Peer:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it writes a line a request, whatever it is told
            env={**os.environ, "DYN_LOG": "error"},
        )
        try:
            self._read()
        except ClusterError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, do: str, **numbers: int) -> dict[str, Any]:
        """Let it do one thing. Raises ClusterError when it ends instead."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **numbers}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ClusterError(f"--peer-python: the peer ended: {error}") from error
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise ClusterError(
            "--peer-python: the peer ended; are ai-dynamo-runtime and pyzmq installed there? "
            f"Try: {' '.join(self._command)}"
        )


def run(plan: Plan, peer_python: Path | None, as_json: bool) -> None:
    """Measure, and print a table or one JSON object. Raises ClusterError."""
    document: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "plan": asdict(plan),
    }
    _say("decisions")
    document["table"] = [_cell(work) for work in plan.table()]
    document |= _growth(document["table"])
    _say("beside the peer" if peer_python else "alone, without --peer-python")
    if peer_python is None:
        document |= _compared(plan, None)
    else:
        with Peer(peer_python) as peer:
            document |= _compared(plan, peer)
    _say("over a Redis of its own")
    document["live"] = asdict(bench_routing_live.measure(8, plan.quick))
    click.echo(json.dumps(document, indent=2) if as_json else "\n".join(_lines(document)))


def _cell(work: IndexWork) -> dict[str, float]:
    """One row of the table: what a match and a whole placement take."""
    router = OurRouter(work)
    router.check()
    with _no_collection():
        router.place_us()
        match, place = router.match_us(), router.place_us()
    return {
        "index_blocks": work.blocks,
        "workers": work.workers,
        "prompt_blocks": work.prompt_blocks,
        "match_p50_us": statistics.median(match),
        "match_p99_us": _p99(match),
        "place_p50_us": statistics.median(place),
        "place_p99_us": _p99(place),
        "decisions_per_s": 1e6 / statistics.mean(place),
    }


def _growth(table: list[dict[str, float]]) -> dict[str, float]:
    """What a decision at the most workers costs, in decisions at the fewest: the worst pair of cells."""
    by_workers: dict[float, dict[tuple[float, float], float]] = {}
    for row in table:
        cell = (row["index_blocks"], row["prompt_blocks"])
        by_workers.setdefault(row["workers"], {})[cell] = row["place_p50_us"]
    few, many = by_workers[min(by_workers)], by_workers[max(by_workers)]
    return {"decision_512_to_8_workers_ratio": max(many[cell] / few[cell] for cell in few)}


def _compared(plan: Plan, peer: Peer | None) -> dict[str, Any]:
    work, prompts = plan.match, 20 if plan.quick else 60
    router = OurRouter(work)
    decider = OurRouter(IndexWork(512, SELECT_WORKERS, 32))
    pairs: dict[str, list[tuple[float, float]]] = {}
    if peer is not None:
        wrong = peer.ask("build", **asdict(work))["wrong"]
        assert wrong == 0, f"the peer knows {wrong} prompts otherwise than the work says"
    with _no_collection():
        for round_number in range(plan.rounds):
            _say(f"round {round_number + 1} of {plan.rounds}")
            theirs = statistics.median(peer.ask("match")["us"]) if peer else 0.0
            pairs.setdefault("match_512_us", []).append((statistics.median(router.match_us()), theirs))
            for tokens in SELECT_TOKENS:
                asked = {"tokens": tokens, "prompts": prompts, "workers": SELECT_WORKERS}
                theirs = statistics.median(peer.ask("select", **asked)["us"]) if peer else 0.0
                ours = statistics.median(decider.select_us(tokens, prompts))
                pairs.setdefault(f"select_{tokens}_tokens_us", []).append((ours, theirs))
            blocks, seconds = bench_routing_ours.apply_events_s(plan.events)
            answer = peer.ask("events", **asdict(plan.events)) if peer else {"blocks": 0, "s": 1.0}
            pair = (blocks / seconds, answer["blocks"] / answer["s"])
            pairs.setdefault("events_blocks_per_s", []).append(pair)
    return _summary(pairs, peer is not None)


def _summary(pairs: dict[str, list[tuple[float, float]]], compared: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, rounds in pairs.items():
        found[f"ours_{name}"] = statistics.median(ours for ours, _ in rounds)
        if compared:
            found[f"peer_{name}"] = statistics.median(theirs for _, theirs in rounds)
            ratios = [ours / theirs for ours, theirs in rounds]
            found[f"{name.removesuffix('_us').removesuffix('_per_s')}_ratio"] = statistics.median(ratios)
            found[f"{name.removesuffix('_us').removesuffix('_per_s')}_ratios"] = ratios
    return found


def _lines(document: dict[str, Any]) -> list[str]:
    lines = ["    index  workers  prompt   match p50    p99   place p50    p99  (us)   decisions/s"]
    for row in document["table"]:
        lines.append(
            f"{row['index_blocks']:>9} {row['workers']:>8} {row['prompt_blocks']:>7} "
            f"{row['match_p50_us']:>11.1f} {row['match_p99_us']:>6.0f} {row['place_p50_us']:>11.1f} "
            f"{row['place_p99_us']:>6.0f} {row['decisions_per_s']:>20.0f}"
        )
    lines.append("")
    for name, value in document.items():
        if isinstance(value, int | float):
            lines.append(f"{name:<36} {value:>14.3f}")
    lines += [f"{name:<36} {value:>14.3f}" for name, value in document["live"].items()]
    return lines


class _no_collection:
    """No garbage is collected meanwhile: who measures microseconds would see it as a p99."""

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *about: object) -> None:
        gc.enable()


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _say(what: str) -> None:
    click.echo(f"bench routing: {what}", err=True)
