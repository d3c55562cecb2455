"""Blocks from worker to worker: both directions of one worker, and the RPCs between workers.

Copying is done in threads of its own, a chunk of `chunk_mib` at a time, beside the engine's steps: on a CPU
between two pools' memory and sockets, on a GPU on streams of its own. The engine's thread does bookkeeping
only, so a step waits for a transfer for a microsecond a block and never for the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass

import torch

from kvhive.proto.config import TransferConfig
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.block_desk import BlockDesk, PullOutcome
from kvhive.worker.chain_wire import WantedChain, wanted_chains
from kvhive.worker.sequence import BlockSource
from kvhive.worker.transfer_identity import TransferIdentity
from kvhive.worker.transfer_maker import ChannelMaker
from kvhive.worker.transfer_party import Emulation, Party
from kvhive.worker.transfer_peers import ChannelForgotten, PeerFailed, Peers
from kvhive.worker.transfer_source import TransferSource
from kvhive.worker.transfer_staging import block_bytes
from kvhive.worker.transfer_target import TransferTarget


@dataclass(frozen=True, slots=True)
class TransferAddress:
    """Who a worker is, and where."""

    worker_id: str
    address: str
    """host:port of its kvhive.v1.Worker service."""
    epoch: Callable[[], int]

    @property
    def host(self) -> str:
        """What its channels listen on."""
        return self.address.rpartition(":")[0].strip("[]")


class KvTransfer:
    """One worker's transfers. Belongs to one event loop."""

    def __init__(
        self,
        worker: TransferAddress,
        pool: torch.Tensor,
        identity: TransferIdentity,
        desk: BlockDesk,
        config: TransferConfig,
        cluster_token: str,
        emulation: Emulation | None = None,
    ) -> None:
        """Make ready; `pool` is what blocks are read from and written to. `open` begins it.

        Raises ConfigError for a backend that the pool's device cannot speak.
        """
        self._worker = worker
        self._desk = desk
        self._config = config
        self._peers = Peers(cluster_token)
        self._threads = ThreadPoolExecutor(2 * config.max_concurrent, "transfer")
        self._block_bytes = block_bytes(pool)
        party = Party(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            pool=pool,
            identity=identity,
            desk=desk,
            maker=ChannelMaker(worker.host, pool.device, config.backend),
            config=config,
            threads=self._threads,
            emulation=emulation or Emulation(),
        )
        self._source = TransferSource(party)
        self._target = TransferTarget(party, self._peers)

    def open(self, pulling: bool = True) -> None:
        """Tell the world that blocks move here; with `pulling`, to this worker, too."""
        self._desk.open(self._target.start if pulling else None, self._block_bytes)

    def send_blocks(
        self, request: worker_pb2.SendBlocksRequest
    ) -> AsyncGenerator[worker_pb2.SendBlocksResponse, None]:
        """Serve a pull of another worker. Raises as TransferSource.send does."""
        return self._source.send(request)

    async def fetch_chains(
        self, request: worker_pb2.FetchChainsRequest
    ) -> AsyncGenerator[worker_pb2.ChainCopied, None]:
        """Pull chains, as many at a time as pulls may be under way. Raises InvalidRequest."""
        chains = wanted_chains(request.chains)
        wire = request.source
        slots = asyncio.Semaphore(self._config.max_concurrent)

        async def fetch(index: int) -> worker_pb2.ChainCopied:
            chain = chains[index]
            source = BlockSource(wire.worker_id, wire.address, wire.epoch, len(chain.hashes))
            async with slots:
                blocks, error = await self._fetch(chain, source)
            return worker_pb2.ChainCopied(chain=index, blocks=blocks, error=error)

        tasks = [asyncio.create_task(fetch(index)) for index in range(len(chains))]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for each in tasks:
                each.cancel()

    async def copy_chains(
        self, request: worker_pb2.CopyChainsRequest
    ) -> AsyncGenerator[worker_pb2.ChainCopied, None]:
        """Let another worker pull chains from this one. Raises InvalidRequest, PeerFailed."""
        lengths = [len(chain.hashes) for chain in wanted_chains(request.chains)]
        worker = self._worker
        own = worker_pb2.BlockSource(worker_id=worker.worker_id, address=worker.address, epoch=worker.epoch())
        fetch = worker_pb2.FetchChainsRequest(
            worker_id=request.target.worker_id, source=own, chains=request.chains
        )
        timeout_s = 2 * self._config.timeout_s * (1 + len(lengths) // self._config.max_concurrent)
        try:
            async with aclosing(
                self._peers.fetch_chains(request.target.address, fetch, timeout_s)
            ) as answers:
                async for answer in answers:
                    yield answer
        except ChannelForgotten as error:
            raise PeerFailed(PullOutcome.REFUSED, str(error)) from None

    async def close(self) -> None:
        """Give up what is under way, give back what is held, close every connection."""
        self._desk.open(None, 0)
        await self._target.close()
        await self._source.close()
        await self._peers.close()
        self._threads.shutdown(wait=False)

    async def _fetch(self, chain: WantedChain, source: BlockSource) -> tuple[int, str]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[int, str]] = loop.create_future()

        def settle(blocks: int, error: str) -> None:
            if not ended.done():
                ended.set_result((blocks, error))

        def done(blocks: int, error: str) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, blocks, error)

        self._desk.fetch(chain.hashes, source, done, chain.pin)
        return await ended
