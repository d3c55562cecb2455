"""`kvhive bench proxy`: what the way from the worker to the client costs, without a model."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from dataclasses import dataclass
from typing import Any

import click

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts.bench_proxy_client import Door, Load, grpc_door, http_door, run_load, worker_door
from kvhive.scripts.bench_proxy_rig import Rig, cpu_s, running_rig

STREAMS = 8
PROMPT_CHARACTERS = 4096
SHARED_CHARACTERS = 3072
GROUPS = 64
"""Conversations, each with a beginning of its own that its requests share."""
_WORDS = ["alpha", "beta", "gamma", "delta", "router", "cache", "prefix", "token", "model", "serve"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int = 3
    tokens: int = 200
    """Of each of the eight streams, a round."""
    step_s: float = 0.01
    """Between two of them."""
    requests: int = 1000
    """With a prompt of 4 KB and an output of one token, a round."""


@dataclass(slots=True)
class Cost:
    """What one kind of traffic took, in CPU microseconds."""

    router_us: float
    worker_us: float


def prompt_text(number: int) -> str:
    """Return 4 KB of words: a beginning that every 64th prompt shares, a number, and an end."""
    start, tail = _words(number % GROUPS, SHARED_CHARACTERS), _words(-1, PROMPT_CHARACTERS)
    return f"{start}{number} {tail}"[:PROMPT_CHARACTERS]


def _words(seed: int, characters: int) -> str:
    chooser = random.Random(seed)
    return " ".join(chooser.choices(_WORDS, k=characters // 4))[:characters]


def chat_body(number: int, model: str, max_tokens: int, stream: bool) -> dict[str, Any]:
    """Return a chat request with a prompt of 4 KB."""
    messages = [{"role": "user", "content": prompt_text(number)}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": stream}


def decoding_doors(rig: Rig, tokens: int) -> dict[str, Door]:
    """Return the ways in of a stream that decodes."""
    ids = tuple(range(1000, 1064))
    text = {"model": "stub", "prompt": list(ids), "max_tokens": tokens, "ignore_eos": True, "stream": True}
    chat = {"model": "stub", "messages": [{"role": "user", "content": "Hello"}]} | {
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    sampling = pb.SamplingParams(max_tokens=tokens, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling)
    return {
        "completions": http_door(rig.http, "/v1/completions", lambda number: text),
        "chat": http_door(rig.http, "/v1/chat/completions", lambda number: chat),
        "grpc": grpc_door(rig.grpc, lambda number: request),
    }


def measured(rig: Rig, door: Door, concurrency: int, requests: int, per: int) -> tuple[Cost, Load]:
    """Run a load; return its cost for each of `per` things."""
    before = cpu_s(rig.router_pid), cpu_s(rig.worker_pid)
    load = asyncio.run(run_load(door, concurrency, requests))
    router, worker = cpu_s(rig.router_pid) - before[0], cpu_s(rig.worker_pid) - before[1]
    return Cost(router / per * 1e6, worker / per * 1e6), load


def decoding(plan: Plan) -> dict[str, Any]:
    """Measure CPU for each token of eight streams on one worker, by way in."""
    found: dict[str, list[Cost]] = {}
    with running_rig(1, plan.step_s) as rig:
        for _ in range(plan.rounds):
            for name, door in decoding_doors(rig, plan.tokens).items():
                cost, _ = measured(rig, door, STREAMS, STREAMS, STREAMS * plan.tokens)
                found.setdefault(name, []).append(cost)
    return {name: _medians(costs) for name, costs in found.items()}


def requesting(plan: Plan) -> dict[str, Any]:
    """Measure requests with a prompt of 4 KB on four workers: CPU, rate, and the first token's delay."""
    with running_rig(4, 0.0) as rig:
        path = "/v1/chat/completions"
        door = http_door(rig.http, path, lambda number: chat_body(number, "stub", 1, False))
        costs, rates = [], []
        for _ in range(plan.rounds):
            cost, load = measured(rig, door, 32, plan.requests, plan.requests)
            costs.append(cost)
            rates.append(plan.requests / load.wall_s)
        ids = tuple(range(1000, 1900))
        straight = worker_door(rig.workers, rig.token, lambda number: (number, *ids))
        one = http_door(rig.http, path, lambda number: chat_body(number, "stub", 1, True))
        text = {"model": "stub", "max_tokens": 1, "stream": True}
        small = http_door(
            rig.http, "/v1/completions", lambda number: text | {"prompt": [number + 1, *range(1000, 1016)]}
        )
        first: dict[str, list[float]] = {"straight": [], "router 4 KB": [], "router short": []}
        for _ in range(plan.rounds):
            for name, each in (("straight", straight), ("router 4 KB", one), ("router short", small)):
                load = asyncio.run(run_load(each, 1, plan.requests // 4))
                first[name].append(load.first_ms())
        return {
            **_medians(costs),
            "requests_per_s": statistics.median(rates),
            "first_ms": {name: statistics.median(times) for name, times in first.items()},
        }


def _medians(costs: list[Cost]) -> dict[str, float]:
    return {
        "router_us": statistics.median(cost.router_us for cost in costs),
        "worker_us": statistics.median(cost.worker_us for cost in costs),
    }


@click.command()
@click.option("--rounds", default=3)
@click.option("--only", default="")
def main(rounds: int, only: str) -> None:
    """Measure and print."""
    plan = Plan(rounds=rounds)
    if only in ("", "decode"):
        print(json.dumps(decoding(plan), indent=1))
    if only in ("", "request"):
        print(json.dumps(requesting(plan), indent=1))


if __name__ == "__main__":
    main()
