"""`kvhive bench proxy`: what the way from the worker to the client costs, without a model."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click

from kvhive.proto.errors import ConfigError
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts.bench_proxy_client import Door, grpc_door, http_door, run_load, worker_door
from kvhive.scripts.bench_proxy_rig import Rig, running_rig

STREAMS = 8
CONCURRENCY = 32
"""Requests at a time where the rate is measured."""
WORKERS = 4
PROMPT_CHARACTERS = 4096
SHARED_CHARACTERS = 3072
GROUPS = 64
"""Conversations, each with a beginning of its own that its requests share."""
CHAT = "/v1/chat/completions"

Figures = dict[str, dict[str, float]]
"""By what was measured."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int = 3
    tokens: int = 300
    """Of each of the eight streams, a round."""
    step_s: float = 0.01
    """Between two of them."""
    requests: int = 600
    """With a prompt of 4 KB and an output of one token, a round."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another router, which somebody has started."""

    name: str
    url: str
    pid: int
    """Of its process, or of that which has started its processes."""
    model: str = "stub"


def parse_peer(text: str) -> Peer:
    """Read NAME=URL,PID[,MODEL]. Raises ConfigError."""
    name, _, rest = text.partition("=")
    url, pid, model, more = [*rest.split(",", 3), "", "", ""][:4]
    if not (name and url.startswith("http://") and pid.isdecimal()) or more:
        raise ConfigError(f"--peer: must be NAME=http://HOST:PORT,PID or NAME=URL,PID,MODEL, is {text!r}")
    return Peer(name, url.rstrip("/"), int(pid), model or "stub")


def run(plan: Plan, peers: Sequence[Peer], as_json: bool) -> None:
    """Measure everything and print it. Raises ClusterError where something does not start."""
    found = {"per token": decoding(plan), "per request": requesting(plan, peers)}
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for title, figures in found.items():
        click.echo(title)
        for name, values in figures.items():
            click.echo(f"  {name:18}" + "  ".join(f"{value:9.2f} {key}" for key, value in values.items()))


def decoding(plan: Plan) -> Figures:
    """Measure CPU for each token of eight streams on one worker, by way in."""
    figures: dict[str, list[dict[str, float]]] = {}
    with running_rig(1, plan.step_s) as rig:
        for _ in range(plan.rounds):
            for name, door in _decoding_doors(rig, plan.tokens).items():
                before = cpu_s(rig.router_pid), cpu_s(rig.worker_pid)
                load = asyncio.run(run_load(door, STREAMS, STREAMS))
                count = STREAMS * plan.tokens
                spent = {
                    "router_us": (cpu_s(rig.router_pid) - before[0]) / count * 1e6,
                    "worker_us": (cpu_s(rig.worker_pid) - before[1]) / count * 1e6,
                    "first_ms": load.first_ms(),
                }
                figures.setdefault(name, []).append(spent)
    return _medians(figures)


def requesting(plan: Plan, peers: Sequence[Peer]) -> Figures:
    """Measure requests with a prompt of 4 KB, by router, in turn: CPU, rate, and the first text's delay."""
    figures: dict[str, list[dict[str, float]]] = {}
    with running_rig(WORKERS, 0.0) as rig:
        targets = [Peer("kvhive", rig.http, rig.router_pid), *peers]
        doors = _same_request_doors(rig)
        for turn in range(plan.rounds):
            first_number = turn * plan.requests * 2
            for name, door in doors.items():
                load = asyncio.run(run_load(door, 1, plan.requests // 4, first_number))
                figures.setdefault(name, []).append({"first_ms": load.first_ms()})
                first_number += plan.requests // 4  # a prompt that nobody has cached
            for target in targets:
                figures.setdefault(target.name, []).append(_one_turn(plan, target, first_number))
    return _medians(figures)


def _same_request_doors(rig: Rig) -> dict[str, Door]:
    """Return the way of one request, 901 token ids, to a worker itself and through the router."""

    def prompt(number: int) -> tuple[int, ...]:
        return (number % 30_000, *range(1000, 1900))

    def body(number: int) -> dict[str, Any]:
        return {"model": "stub", "prompt": prompt(number), "max_tokens": 1, "stream": True}

    return {
        "worker, straight": worker_door(rig.workers, rig.token, prompt),
        "kvhive, the same": http_door(rig.http, "/v1/completions", body),
    }


def _one_turn(plan: Plan, target: Peer, first_number: int) -> dict[str, float]:
    whole = http_door(target.url, CHAT, _chat(target.model, stream=False))
    before = cpu_s(target.pid)
    load = asyncio.run(run_load(whole, CONCURRENCY, plan.requests, first_number))
    spent = (cpu_s(target.pid) - before) / plan.requests * 1e6
    streamed = http_door(target.url, CHAT, _chat(target.model, stream=True))
    alone = asyncio.run(run_load(streamed, 1, plan.requests // 4, first_number + plan.requests))
    return {"router_us": spent, "requests_s": plan.requests / load.wall_s, "first_ms": alone.first_ms()}


def _chat(model: str, stream: bool) -> Callable[[int], dict[str, Any]]:
    def body(number: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt_text(number)}]
        return {"model": model, "messages": messages, "max_tokens": 1, "stream": stream}

    return body


def prompt_text(number: int) -> str:
    """Return 4 KB of English and code: a beginning that every 64th prompt shares, and an end of its own."""
    start = _passage(number % GROUPS, SHARED_CHARACTERS)
    return f"{start} {number} {_passage(GROUPS + number, PROMPT_CHARACTERS)}"[:PROMPT_CHARACTERS]


def _passage(number: int, characters: int) -> str:
    """Return a part of Python's own help texts, another one for each number."""
    book = _book()
    start = random.Random(number).randrange(len(book) - characters)
    return book[start : start + characters]


@functools.cache
def _book() -> str:
    return "\n".join(text for _, text in sorted(topics.items()))


def _decoding_doors(rig: Rig, tokens: int) -> dict[str, Door]:
    """Return the ways in of a stream that decodes."""
    ids = tuple(range(1000, 1064))
    asked = {"model": "stub", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    text, chat = asked | {"prompt": ids}, asked | {"messages": [{"role": "user", "content": "Hello"}]}
    sampling = pb.SamplingParams(max_tokens=tokens, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling)
    return {
        "completions": http_door(rig.http, "/v1/completions", lambda number: text),
        "chat": http_door(rig.http, CHAT, lambda number: chat),
        "grpc": grpc_door(rig.grpc, lambda number: request),
    }


def cpu_s(root: int) -> float:
    """Return the CPU seconds so far of a process and of those that it and they have started."""
    parents, spent = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(fields[1])
            spent[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    if root not in spent:
        raise ConfigError(f"--peer: there is no process {root}")
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(spent[pid] for pid in family)


def _medians(figures: dict[str, list[dict[str, float]]]) -> Figures:
    return {
        name: {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        for name, turns in figures.items()
    }
