"""Two workers of two ranks each, under Ray: a rank is killed, and nobody loses an answer."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path
from typing import Any

import pytest
from inference import Client, by_tokens

from kvhive.scripts.owned_processes import processes_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

PROMPT = [2000 + 13 * i for i in range(40)]
TOKENS = 60


def ranks_of(runtime_dir: Path, worker_id: str) -> set[int]:
    """The processes of one worker."""
    mark, found = f"KVHIVE_WORKER={worker_id}".encode(), set()
    for process in processes_of(runtime_dir):
        folder = Path(f"/proc/{process.pid}")
        if mark in (folder / "environ").read_bytes() and b"ray::" in (folder / "cmdline").read_bytes():
            found.add(process.pid)
    return found


async def test_a_killed_rank_takes_its_worker_along_and_no_stream(tmp_path: Path, two_ranks: Any) -> None:
    with two_ranks(tmp_path) as cluster:
        runtime_dir = Path(cluster.kvhive.state()["runtime_dir"])
        async with Client(cluster.grpc) as client:
            whole = await client.generate(by_tokens(PROMPT, TOKENS, cache_salt=secrets.token_hex(4)))
            begun = asyncio.Event()
            request = by_tokens(PROMPT, TOKENS, cache_salt=secrets.token_hex(4))
            stream = asyncio.create_task(client.generate(request, first_token=begun))
            await begun.wait()
            busy = await client.until(lambda c: any(w.running for w in c.workers), 5.0, "decoding")
            victim = next(w for w in busy.workers if w.running)
            (other,) = ranks_of(runtime_dir, victim.id) - {victim.pid}
            os.kill(other, signal.SIGKILL)
            struck = await stream
            assert (struck.token_ids, struck.text) == (whole.token_ids, whole.text)
            assert struck.usage is not None and struck.usage.failovers == 1
            assert struck.usage.worker_id != victim.id

            def returned(c: Any) -> bool:
                return any(w.id == victim.id and w.epoch > victim.epoch and w.routable for w in c.workers)

            back = await client.until(returned, 120.0, "restarted under a new epoch")
            (new,) = (w for w in back.workers if w.id == victim.id)
            ranks = ranks_of(runtime_dir, victim.id)
            assert new.pid in ranks and len(ranks) == 2 and not ranks & {victim.pid, other}
            salts = [secrets.token_hex(4) for _ in range(12)]
            answers = [await client.generate(by_tokens(PROMPT, 2, cache_salt=salt)) for salt in salts]
            assert {tuple(answer.token_ids) for answer in answers} == {tuple(whole.token_ids[:2])}
            assert victim.id in {answer.worker_id for answer in answers}
