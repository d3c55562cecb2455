"""The sending side of a pull: lends the blocks, says how many there are, sends them, takes them back.

The blocks are given back on every way out, also when whoever asked has vanished, and always after the thread
that reads them has ended, which it does within the time that one chunk may take.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass

from kvhive.proto.block_hash import BlockHash
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.block_moves import Loan
from kvhive.worker.chain_wire import HASH_BYTES
from kvhive.worker.transfer_cargo import Cargo
from kvhive.worker.transfer_channel import SENDER, ChannelBroken, ChannelPlan
from kvhive.worker.transfer_lanes import Lane, Lanes
from kvhive.worker.transfer_pace import Pace, TransferStopped
from kvhive.worker.transfer_party import Party, read_identity, wire_identity
from kvhive.worker.transfer_staging import block_bytes

log = logging.getLogger(__name__)

NONCE_BYTES = 16
MAX_NAME_CHARS = 256


class SendRefused(Exception):
    """This is not the worker that is meant, or its blocks are of another kind; the message says which."""


class SendBusy(Exception):
    """It sends to as many as it may already."""


class ChannelUnknown(Exception):
    """The asker names a channel that this worker does not have any more."""


@dataclass(frozen=True, slots=True)
class _Send:
    """What one send has, or may get yet."""

    pace: Pace
    lent: asyncio.Future[Loan]
    lane: Lane | None
    job: asyncio.Task[None] | None
    first_block: int


class TransferSource:
    """One worker's sending side. For one event loop; the copying is in threads."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self._lanes = Lanes()
        self._sending: set[Pace] = set()
        self._jobs: set[asyncio.Task[None]] = set()

    async def send(
        self, request: worker_pb2.SendBlocksRequest
    ) -> AsyncGenerator[worker_pb2.SendBlocksResponse, None]:
        """Serve one SendBlocks call. Raises SendRefused, SendBusy, ChannelUnknown, ChannelBroken."""
        party, config = self._party, self._party.config
        hashes = self._check(request)
        if len(self._sending) >= config.max_concurrent:
            raise SendBusy(f"{len(self._sending)} sends are under way, the limit is {config.max_concurrent}")
        seconds = min(request.timeout_s, config.timeout_s)
        pace = Pace(time.monotonic() + seconds, config.stall_timeout_s)
        pace.bytes_per_s, pace.delay_s = party.emulation.bytes_per_s, party.emulation.delay_s
        self._sending.add(pace)
        lent, lane, job = self._lend(hashes), None, None
        try:
            loan = await asyncio.wait_for(asyncio.shield(lent), seconds)
            blocks = loan.block_ids[request.first_block :]
            granted = self._granted(request, blocks)
            if not blocks:
                yield worker_pb2.SendBlocksResponse(granted=granted)
                return
            async with asyncio.timeout(seconds):
                lane = await self._lanes.take(request.target_id)
            plan = self._plan(request, granted.backend, lane)
            yield worker_pb2.SendBlocksResponse(granted=granted)
            wanted = hashes[request.first_block : request.first_block + len(blocks)]
            cargo = Cargo(request.nonce, wanted, blocks, granted.chunk_blocks)
            job = asyncio.create_task(self._run(lane, plan, cargo, pace))
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)
            await asyncio.shield(job)
            yield worker_pb2.SendBlocksResponse(sent=worker_pb2.BlocksSent())
        except TimeoutError:
            raise ChannelBroken("the engine did not lend, or another send did not end, in time") from None
        finally:
            pace.stopped.set()
            self._when_over(_Send(pace, lent, lane, job, request.first_block))

    async def close(self) -> None:
        """Give up what is under way, and close the channels."""
        for pace in self._sending:
            pace.stopped.set()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        self._lanes.close()

    def _check(self, request: worker_pb2.SendBlocksRequest) -> list[BlockHash]:
        party = self._party
        meant, here = (request.worker_id, request.epoch), (party.worker_id, party.epoch())
        if meant != here:
            raise SendRefused(f"worker_id, epoch: meant for {meant}, this is {here}")
        mismatch = party.identity.mismatch(read_identity(request.identity))
        if mismatch:
            raise SendRefused(mismatch)
        if party.identity.tp > 1:
            raise SendRefused(f"tp: blocks of workers of {party.identity.tp} ranks do not move")
        packed = request.hashes
        if not packed or len(packed) % HASH_BYTES or len(request.nonce) != NONCE_BYTES:
            raise SendRefused(
                f"hashes, nonce: must be whole hashes of {HASH_BYTES} bytes and {NONCE_BYTES} bytes, "
                f"are {len(packed)} and {len(request.nonce)}"
            )
        if len(request.channel) > MAX_NAME_CHARS or len(request.target_id) > MAX_NAME_CHARS:
            raise SendRefused(f"channel, target_id: must have at most {MAX_NAME_CHARS} characters")
        if not request.first_block < len(packed) // HASH_BYTES or not request.timeout_s > 0:
            raise SendRefused("first_block, timeout_s: nothing is asked for, or no time is given")
        return [BlockHash(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES)]

    def _granted(self, request: worker_pb2.SendBlocksRequest, blocks: list[int]) -> worker_pb2.BlocksGranted:
        party, nbytes = self._party, block_bytes(self._party.pool)
        spoken = [name for name in request.backends if name in party.maker.backends()]
        if not spoken:
            raise SendRefused(f"backends: {list(request.backends)} and {party.maker.backends()} share none")
        chunk_blocks = max(1, int(party.config.chunk_mib * 2**20) // nbytes)
        return worker_pb2.BlocksGranted(
            blocks=len(blocks),
            tokens=len(blocks) * party.identity.block_size,
            identity=wire_identity(party.identity),
            backend=spoken[0],
            chunk_blocks=chunk_blocks,
            block_bytes=nbytes,
        )

    def _plan(self, request: worker_pb2.SendBlocksRequest, backend: str, lane: Lane) -> ChannelPlan:
        """Return the plan of the channel to who asks. Raises ChannelUnknown."""
        plan = ChannelPlan(request.channel, request.store, backend)
        if not request.new_channel and not (lane.open and lane.plan == plan):
            raise ChannelUnknown(f"channel: {request.channel!r} is not known")
        return plan

    async def _run(self, lane: Lane, plan: ChannelPlan, cargo: Cargo, pace: Pace) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._party.threads, self._send, lane, plan, cargo, pace)

    def _send(self, lane: Lane, plan: ChannelPlan, cargo: Cargo, pace: Pace) -> None:
        try:
            if lane.plan != plan or not lane.open:
                lane.close()
                lane.plan = plan
                lane.channel = self._party.maker.make(plan, SENDER, pace.next_limit(), pace.stopped)
            assert lane.channel is not None
            lane.channel.send(self._party.pool, cargo, pace)
        except (ChannelBroken, TransferStopped) as error:
            lane.close()
            raise ChannelBroken(str(error)) from None
        except BaseException:
            lane.close()
            raise

    def _lend(self, hashes: list[BlockHash]) -> asyncio.Future[Loan]:
        loop = asyncio.get_running_loop()
        lent: asyncio.Future[Loan] = loop.create_future()

        def settle(loan: Loan) -> None:
            with suppress(RuntimeError):  # the loop has ended, and the worker with it
                loop.call_soon_threadsafe(lent.set_result, loan)

        self._party.desk.lend(hashes, settle)
        return lent

    def _when_over(self, of: _Send) -> None:
        """Take everything back once the blocks have been lent and nobody reads them any more."""

        def give_back(_: object) -> None:
            if not of.lent.done():
                of.lent.add_done_callback(give_back)
            elif of.job is not None and not of.job.done():
                of.job.add_done_callback(give_back)
            else:
                sent = of.job is not None and not of.job.cancelled() and of.job.exception() is None
                loan = of.lent.result()
                self._party.desk.give_back(loan, len(loan.blocks[of.first_block :]) if sent else 0)
                if of.lane is not None:
                    self._lanes.give_back(of.lane)
                self._sending.discard(of.pace)

        give_back(None)
