"""Pairs of workers whose blocks move: what tests ask of them, and how they must be left behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from worker_rig import METADATA, WorkerRig, running_worker

from kvhive.proto.config import TransferConfig
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.transfer_party import Emulation

CHUNK_MIB = 64 / 2**20
"""Four of the simulated model's blocks: a chain has many chunks."""

TRANSFER = TransferConfig(timeout_s=20.0, stall_timeout_s=5.0, chunk_mib=CHUNK_MIB)  # type: ignore[arg-type]


def prompt_of(seed: int, tokens: int) -> list[int]:
    """Tokens like no other seed's."""
    rng = random.Random(seed)
    return [rng.randrange(900) for _ in range(tokens)]


def source_of(worker: WorkerRig, blocks: int, **changes: object) -> worker_pb2.BlockSource:
    """Name a worker as the source."""
    fields = {"worker_id": worker.worker_id, "address": worker.address, "epoch": 1, "blocks": blocks}
    return worker_pb2.BlockSource(**{**fields, **changes})


async def ask(
    worker: WorkerRig,
    name: str,
    prompt: list[int],
    source: worker_pb2.BlockSource | None = None,
    **fields: object,
) -> worker_pb2.WorkerGenerateResponse:
    """Generate; the answer must be the oracle's, wherever the blocks came from. Return the first message."""
    responses = await worker.generate(worker.request(name, prompt, 4, source=source, **fields))
    tokens = [t for r in responses for update in r.updates for t in update.token_ids]
    assert tokens == worker.oracle(prompt, 4), f"{name}: a block held the wrong tokens"
    return responses[0]


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait for something; fail when it takes longer."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)


async def at_rest(*workers: WorkerRig) -> None:
    """Nobody holds anything, and every block is accounted for."""
    for worker in workers:
        await worker.idle(15.0)
        await until(lambda w=worker: w.engine.desk.moves.idle)  # type: ignore[misc]
        usage = worker.pool.usage()
        assert usage.live == 0 and usage.cached + usage.free == usage.total
        assert all(block.ref_count == 0 for block in worker.pool.blocks)
        assert worker.engine.load.accounting_errors == 0


async def outcomes(worker: WorkerRig) -> dict[str, int]:
    """What became of its pulls."""
    status = await worker.stub.GetStatus(worker_pb2.GetStatusRequest(), metadata=METADATA)
    return dict(status.pulls)


@asynccontextmanager
async def pair(
    config: TransferConfig = TRANSFER, emulation: Emulation | None = None, **options: object
) -> AsyncIterator[tuple[WorkerRig, WorkerRig]]:
    """Two workers: `a`, whose sending may be slowed down, and `b`, which `options` are for."""
    async with (
        running_worker("a", transfer=config, emulation=emulation) as a,
        running_worker("b", transfer=config, **options) as b,  # type: ignore[arg-type]
    ):
        yield a, b
