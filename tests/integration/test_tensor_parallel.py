"""Two workers of two ranks each, under Ray: a rank is killed, and nobody loses an answer."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inference import Client, by_tokens

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts.owned_processes import processes_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PROMPT = [(7 * i) % 250 + 4 for i in range(40)]
TOKENS = 200


def ranks_of(runtime_dir: Path, worker_id: str) -> set[int]:
    """The processes of one worker."""
    mark, found = f"KVHIVE_WORKER={worker_id}".encode(), set()
    for process in processes_of(runtime_dir):
        folder = Path(f"/proc/{process.pid}")
        if mark in (folder / "environ").read_bytes() and b"ray::" in (folder / "cmdline").read_bytes():
            found.add(process.pid)
    return found


async def workers_that_answer(client: Client, tokens: list[int]) -> set[str]:
    """Who answers strangers that come at once; one by one, the faster worker would have them all."""
    salts = [secrets.token_hex(4) for _ in range(24)]
    answers = await asyncio.gather(
        *(client.generate(by_tokens(PROMPT, len(tokens), cache_salt=salt)) for salt in salts)
    )
    assert all(answer.token_ids == tokens for answer in answers)
    return {answer.worker_id for answer in answers}


async def struck(client: Client, kill_rank_of: Callable[[str], None]) -> tuple[list[int], pb.Usage]:
    """Begin a stream, strike its worker at the first token, and return what came and how it ended."""
    tokens, worker_id, usage = [], "", pb.Usage()
    request = by_tokens(PROMPT, TOKENS, cache_salt="struck")
    async for response in client.stub.Generate(request):
        match response.WhichOneof("event"):
            case "started":
                worker_id = worker_id or response.started.worker_id
            case "delta":
                if not tokens:
                    kill_rank_of(worker_id)
                tokens.extend(response.delta.token_ids)
            case "finished":
                usage = response.finished.usage
    return tokens, usage


async def test_a_killed_rank_takes_its_worker_along_and_no_stream(two_ranks: Any) -> None:
    runtime_dir = Path(two_ranks.kvhive.state()["runtime_dir"])
    async with Client(two_ranks.grpc) as client:
        whole = await client.generate(by_tokens(PROMPT, TOKENS, cache_salt="whole"))
        before = {worker.id: worker for worker in (await client.cluster()).workers}
        killed: dict[str, set[int]] = {}

        def kill_rank_of(worker_id: str) -> None:
            killed[worker_id] = ranks_of(runtime_dir, worker_id)
            (other,) = killed[worker_id] - {before[worker_id].pid}
            os.kill(other, signal.SIGKILL)

        tokens, usage = await struck(client, kill_rank_of)
        ((victim, gone),) = killed.items()
        assert tokens == whole.token_ids
        assert usage.failovers == 1 and usage.worker_id != victim

        def returned(c: Any) -> bool:
            return any(w.id == victim and w.epoch > before[victim].epoch and w.routable for w in c.workers)

        back = await client.until(returned, 120.0, "restarted under a new epoch")
        (new,) = (worker for worker in back.workers if worker.id == victim)
        ranks = ranks_of(runtime_dir, victim)
        assert new.pid in ranks and len(ranks) == 2 and not ranks & gone
        assert await workers_that_answer(client, whole.token_ids[:2]) == set(before)
