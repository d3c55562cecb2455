"""A cluster that changes while it serves: a worker drains, another one comes, and its parts are killed.

One cluster for all of it, and the last that is done with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from inference import Client, Result, by_tokens

from kvhive.scripts.cluster_state import ClusterState, StateFolder
from kvhive.scripts.owned_processes import is_alive, processes_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SESSIONS = 16
PROMPT_TOKENS = 160
STREAM_TOKENS = 900
"""Longer than the drain that it lives through."""


def session(number: int) -> list[int]:
    source = random.Random(number)
    return [source.randrange(4, 250) for _ in range(PROMPT_TOKENS)]


def client_of(cluster: Any) -> Client:
    return Client(cluster.grpc, cluster.keys["root"])


async def replay(client: Client) -> dict[str, int]:
    """Ask what all sessions ask; return the tokens that each worker had cached."""
    answers = await asyncio.gather(*(client.generate(by_tokens(session(n), 2)) for n in range(SESSIONS)))
    hits: dict[str, int] = {}
    for answer in answers:
        assert answer.usage is not None
        hits[answer.usage.worker_id] = hits.get(answer.usage.worker_id, 0) + answer.cached
    return hits


def pids(cluster: Any) -> dict[str, int]:
    return {worker["id"]: worker["pid"] for worker in cluster.status()["workers"]}


async def drained_under_load(cluster: Any, client: Client) -> None:
    """Its hot hits are kept by who stays; its streams go on to their end, the tokens of an unbroken run."""
    requests = [by_tokens(session(100 + n), STREAM_TOKENS, cache_salt="streams") for n in range(4)]
    whole = await asyncio.gather(*(client.generate(request) for request in requests))
    for _ in range(2):
        before = await replay(client)
    victim = max(before, key=lambda worker: before[worker])
    begun = [asyncio.Event() for _ in requests]
    streams = [
        asyncio.create_task(client.generate(request, event))
        for request, event in zip(requests, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    done = await asyncio.to_thread(cluster.kvhive, "drain", victim, "--timeout", "20", "--json", timeout=120)
    ended = json.loads(done.stdout)
    assert ended["wanted"] == 1 and ended["done"] and not ended["note"]
    results: list[Result] = await asyncio.gather(*streams)
    assert [r.token_ids for r in results] == [w.token_ids for w in whole]
    after = await replay(client)
    assert victim not in after
    assert sum(after.values()) >= 0.8 * sum(before.values())
    refused = await asyncio.to_thread(cluster.kvhive, "drain", *after, check=False)
    assert refused.returncode == 1 and "the only one that serves" in refused.stderr


async def joined(cluster: Any, client: Client) -> None:
    """A worker that comes later has the hot chains of who was there, before it serves."""
    old = {worker.id for worker in (await client.cluster()).workers}
    await asyncio.to_thread(cluster.kvhive, "scale", "2")
    seen = set[str]()

    def both_serve(answer: Any) -> bool:
        fresh = [worker for worker in answer.workers if worker.id not in old]
        seen.update(worker.state for worker in fresh)
        return any(worker.routable and worker.blocks.cached for worker in fresh)

    answer = await client.until(both_serve, 240.0, "a second worker that was warmed")
    (fresh,) = (worker for worker in answer.workers if worker.id not in old)
    assert fresh.id == "w3" and not fresh.prefix_query_tokens


async def killed(cluster: Any) -> None:
    """Whatever of the cluster dies, no worker does; what supervises is itself replaced by the next `up`."""
    folder = StateFolder(cluster.kvhive.state_dir, "default")
    before, workers = folder.require(), pids(cluster)

    def back(parts: list[str], state: ClusterState) -> bool:
        return all(
            is_alive(getattr(state, part)) and getattr(state, part) != getattr(before, part) for part in parts
        )

    for process in (before.router, before.redis, before.controller):
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
    for _ in range(600):
        if back(["router", "redis", "controller"], folder.require()):
            break
        await asyncio.sleep(0.1)
    assert back(["router", "redis", "controller"], folder.require())
    now = folder.require()
    assert now.restarts == {"router": 1, "redis": 1, "controller": 1}
    for process in (now.supervisor, now.router):
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
    arguments = cluster.arguments
    again = await asyncio.to_thread(cluster.kvhive, "up", *arguments, timeout=200)
    assert "is up again" in again.stdout and "supervisor" in again.stdout
    assert folder.require().grpc == before.grpc
    async with client_of(cluster) as client:
        await client.until(
            lambda answer: {w.id for w in answer.workers if w.routable} == set(workers), 60.0, "all are back"
        )
        assert sum((await replay(client)).values()) > 0
    assert pids(cluster) == workers


def manager_of(runtime_dir: Path) -> int:
    """The process of Ray's node manager."""
    (pid,) = (
        process.pid
        for process in processes_of(runtime_dir)
        if Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[0].endswith(b"/raylet")
    )
    return pid


def alive(processes: set[int]) -> set[int]:
    return {pid for pid in processes if Path(f"/proc/{pid}").exists()}


async def node_lost(cluster: Any) -> None:
    """The node's manager dies, and no worker outlives it: the device would not be free for the next one."""
    workers = set(pids(cluster).values())
    os.kill(manager_of(Path(cluster.kvhive.state()["runtime_dir"])), signal.SIGKILL)
    for _ in range(300):
        if not alive(workers):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"workers outlive the node's manager: {alive(workers)}")


async def test_a_cluster_changes_while_it_serves(ending_keyed_cluster: Any) -> None:
    cluster = ending_keyed_cluster
    async with client_of(cluster) as client:
        await drained_under_load(cluster, client)
        await joined(cluster, client)
    await killed(cluster)
    await node_lost(cluster)
