"""A worker that warms up: it takes blocks and no requests, and serves when it is told to, or by itself."""

from __future__ import annotations

import asyncio

import pytest
from transfer_rig import ask, pair, prompt_of, source_of, until
from worker_rig import METADATA

from kvhive.proto.block_hash import BlockHash
from kvhive.proto.index_schema import WorkerState
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.options import WorkerOptions
from kvhive.worker.server import WorkerServer
from kvhive.worker.service import WorkerService
from kvhive.worker.simulated_runner import SimulatedRunner


async def test_blocks_come_and_requests_are_refused_until_it_serves() -> None:
    async with pair() as (a, b):
        await ask(a, "first", prompt_of(1, 40))
        b.service.state = WorkerState.WARMING
        with pytest.raises(Exception, match="worker b is warming"):
            await b.generate(b.request("early", prompt_of(1, 40)))
        held = [block.block_hash for block in a.pool.blocks if block.block_hash is not None]
        chains = [worker_pb2.Chain(hashes=BlockHash(block_hash)) for block_hash in held[:1]]
        request = worker_pb2.FetchChainsRequest(worker_id="b", source=source_of(a, 1), chains=chains)
        async for _ in b.stub.FetchChains(request, metadata=METADATA):
            pass
        serve = worker_pb2.SetStateRequest(worker_id="b", state="serving")
        await b.stub.SetState(serve, metadata=METADATA)
        await ask(b, "later", prompt_of(1, 40))


class Publisher:
    """The index, as far as a state matters to it."""

    def __init__(self) -> None:
        self.states: list[WorkerState] = []

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def set_state(self, state: WorkerState) -> None:
        self.states.append(state)


async def beginning(warm_s: float, moves_blocks: bool = True) -> tuple[WorkerServer, Publisher]:
    """A server at the moment when it would serve."""
    server = WorkerServer(WorkerOptions("w1", "c", "m", "m", "", "", warm_s=warm_s))
    publisher = Publisher()
    server._publisher = publisher  # type: ignore[assignment]
    server._transfer = object() if moves_blocks else None  # type: ignore[assignment]
    service = server._service = WorkerService("w1", SimulatedRunner(4, 4, 100).shape)
    service.attach(object(), lambda: 1, None, server._tell_state)  # type: ignore[arg-type]
    await server._serve()
    assert server._publishing is not None
    server._publishing.cancel()
    return server, publisher


async def test_nobody_told_it_so_it_serves_by_itself() -> None:
    server, publisher = await beginning(0.05)
    assert publisher.states == [WorkerState.WARMING] and server.progress() == "warming"
    await until(lambda: publisher.states == [WorkerState.WARMING, WorkerState.SERVING])
    assert server.progress() == "serving"
    server._loop.close()


@pytest.mark.parametrize(("warm_s", "moves_blocks"), [(0.0, True), (5.0, False)])
async def test_one_that_is_not_to_be_warmed_or_cannot_be_serves_at_once(
    warm_s: float, moves_blocks: bool
) -> None:
    server, publisher = await beginning(warm_s, moves_blocks)
    assert publisher.states == [WorkerState.SERVING]
    server._loop.close()


async def test_one_that_is_told_to_drain_while_it_warms_does_not_serve_later() -> None:
    server, publisher = await beginning(0.05)
    assert server._service is not None and server._warming is not None
    await server._service.change_state(WorkerState.DRAINING)
    await server._warming
    assert publisher.states == [WorkerState.WARMING, WorkerState.DRAINING]
    server._loop.close()
