"""The receiving side of a pull: asks the source, receives into blocks that were set aside, tells the desk.

Whatever goes wrong, what has come stays and the rest is computed. The desk hears of the end when nothing can
write into the pool any more: the thread has ended, and after a failure its channel is closed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from kvhive.proto.v1 import worker_pb2
from kvhive.worker.block_desk import PullOutcome
from kvhive.worker.block_moves import Arrival
from kvhive.worker.sequence import BlockSource
from kvhive.worker.transfer_cargo import Cargo
from kvhive.worker.transfer_channel import RECEIVER, ChannelBroken, ChannelPlan
from kvhive.worker.transfer_lanes import Lane, Lanes
from kvhive.worker.transfer_pace import Pace, TransferStopped
from kvhive.worker.transfer_party import Party, read_identity, wire_identity
from kvhive.worker.transfer_peers import ChannelForgotten, PeerFailed, Peers
from kvhive.worker.transfer_source import NONCE_BYTES
from kvhive.worker.transfer_staging import block_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")

AVOID_FIRST_S = 1.0
AVOID_LONGEST_S = 64.0
"""How long a source that failed is left alone, twice as long each time: it would cost the next request its
time-out, too."""

MAX_AVOIDED = 256
"""Sources that are remembered for that, the latest ones."""

_FAILURES = (PullOutcome.UNREACHABLE, PullOutcome.BROKEN, PullOutcome.TIMED_OUT)

MAX_CHUNK_BYTES = 64 * 2**20
"""Largest workers.transfer.chunk_mib: what a source may make this side set aside."""


class TransferTarget:
    """One worker's receiving side. `start` may be called from any thread, the rest belongs to one loop."""

    def __init__(self, party: Party, peers: Peers) -> None:
        self._party = party
        self._peers = peers
        self._lanes = Lanes()
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(party.config.max_concurrent)
        self._pulls: dict[asyncio.Task[None], Arrival] = {}
        self._closing = False
        self._avoided: dict[tuple[str, int], tuple[float, float]] = {}
        """By source and epoch: until when, and for how long that is."""

    def start(self, arrival: Arrival, source: BlockSource) -> None:
        """Begin to bring a chain; see StartPull."""
        try:
            self._loop.call_soon_threadsafe(self._spawn, arrival, source)
        except RuntimeError:  # the loop has ended
            self._party.desk.ended(arrival, PullOutcome.CANCELLED)

    async def close(self) -> None:
        """Give up what is under way, and close the channels."""
        self._closing = True
        for arrival in self._pulls.values():
            arrival.stopped.set()
        await asyncio.gather(*self._pulls, return_exceptions=True)
        self._lanes.close()

    def _spawn(self, arrival: Arrival, source: BlockSource) -> None:
        if self._closing:
            self._party.desk.ended(arrival, PullOutcome.CANCELLED)
            return
        task = asyncio.create_task(self._run(arrival, source))
        self._pulls[task] = arrival
        task.add_done_callback(self._pulls.pop)

    async def _run(self, arrival: Arrival, source: BlockSource) -> None:
        config, outcome, reason = self._party.config, PullOutcome.BROKEN, ""
        pace = Pace(time.monotonic() + config.timeout_s, config.stall_timeout_s, arrival.stopped)
        try:
            self._check_avoided(source)
            await self._in_turn(self._slots.acquire(), pace)
            try:
                outcome = await self._pull(arrival, source, pace)
            finally:
                self._slots.release()
        except PeerFailed as error:
            outcome, reason = error.outcome, str(error)
        except ChannelBroken as error:
            late = time.monotonic() >= pace.deadline
            outcome, reason = PullOutcome.TIMED_OUT if late else PullOutcome.BROKEN, str(error)
        except TransferStopped:
            stopped = arrival.stopped.is_set()
            outcome = PullOutcome.CANCELLED if stopped else PullOutcome.TIMED_OUT
        finally:
            self._party.desk.ended(arrival, outcome)
            if outcome in _FAILURES:
                self._avoid(source)
            elif outcome is PullOutcome.PULLED:
                self._avoided.pop((source.worker_id, source.epoch), None)
            level = logging.DEBUG if outcome in (PullOutcome.PULLED, PullOutcome.CANCELLED) else logging.INFO
            log.log(
                level,
                "pull source=%s epoch=%d blocks=%d outcome=%s %s",
                source.worker_id,
                source.epoch,
                len(arrival.missing),
                outcome,
                reason,
            )

    def _check_avoided(self, source: BlockSource) -> None:
        """Raise PeerFailed for a source that has just failed; one that began a new epoch has not."""
        until, pause_s = self._avoided.get((source.worker_id, source.epoch), (0.0, 0.0))
        if until > time.monotonic():
            raise PeerFailed(PullOutcome.AVOIDED, f"it failed within the last {pause_s:g} s")

    def _avoid(self, source: BlockSource) -> None:
        key = source.worker_id, source.epoch
        _, last_s = self._avoided.pop(key, (0.0, 0.0))
        pause_s = min(2 * last_s, AVOID_LONGEST_S) or AVOID_FIRST_S
        while len(self._avoided) >= MAX_AVOIDED:
            del self._avoided[next(iter(self._avoided))]
        self._avoided[key] = time.monotonic() + pause_s, pause_s

    async def _in_turn(self, turn: Awaitable[T], pace: Pace) -> T:
        """Wait for other pulls, half of the time that is left. Raises PeerFailed.

        That they are slow is no fault of this one's source, which is to have the other half.
        """
        try:
            async with asyncio.timeout((pace.deadline - time.monotonic()) / 2):
                return await turn
        except TimeoutError:
            raise PeerFailed(PullOutcome.BUSY, "other pulls to this worker took too long") from None

    async def _pull(self, arrival: Arrival, source: BlockSource, pace: Pace) -> PullOutcome:
        lane = await self._in_turn(self._lanes.take(source.worker_id), pace)
        try:
            if lane.epoch != source.epoch:
                lane.close()  # of a worker that is no more
                lane.epoch = source.epoch
            try:
                return await self._attempt(lane, arrival, source, pace)
            except ChannelForgotten:
                lane.close()
                return await self._attempt(lane, arrival, source, pace)
        except ChannelForgotten as error:
            raise PeerFailed(PullOutcome.REFUSED, str(error)) from None
        finally:
            self._lanes.give_back(lane)

    async def _attempt(self, lane: Lane, arrival: Arrival, source: BlockSource, pace: Pace) -> PullOutcome:
        request = self._request(lane, arrival, source, pace)
        async with aclosing(self._peers.send_blocks(source.address, request)) as answers:
            granted = await self._first(answers)
            self._check(granted, arrival)
            if not granted.blocks:
                return PullOutcome.SHORT
            places = slice(arrival.first, arrival.first + granted.blocks)
            cargo = Cargo(
                request.nonce,
                arrival.hashes[places],
                arrival.incoming[: granted.blocks],
                granted.chunk_blocks,
            )
            plan = ChannelPlan(request.channel, request.store, granted.backend)
            arrived = partial(self._party.desk.arrived, arrival)
            work = partial(self._receive, lane, plan, cargo, pace, arrived)
            await self._loop.run_in_executor(self._party.threads, work)
        return PullOutcome.PULLED if granted.blocks == len(arrival.missing) else PullOutcome.SHORT

    def _request(
        self, lane: Lane, arrival: Arrival, source: BlockSource, pace: Pace
    ) -> worker_pb2.SendBlocksRequest:
        pace.next_limit()  # or the end
        left_s = max(0.001, pace.deadline - time.monotonic())
        party, plan = self._party, lane.plan if lane.open else None
        if plan is None:
            ends = f"{source.worker_id}.{source.epoch}-{party.worker_id}.{party.epoch()}"
            plan = party.maker.plan(f"{ends}-{secrets.token_hex(8)}")
        return worker_pb2.SendBlocksRequest(
            worker_id=source.worker_id,
            epoch=source.epoch,
            target_id=party.worker_id,
            target_epoch=party.epoch(),
            identity=wire_identity(party.identity),
            hashes=b"".join(arrival.hashes),
            first_block=arrival.first,
            nonce=secrets.token_bytes(NONCE_BYTES),
            channel=plan.key,
            store=plan.store,
            new_channel=not lane.open,
            backends=party.maker.backends(),
            timeout_s=left_s,
        )

    async def _first(self, answers: AsyncIterator[worker_pb2.SendBlocksResponse]) -> worker_pb2.BlocksGranted:
        async for answer in answers:
            if answer.HasField("granted"):
                return answer.granted
            break
        raise PeerFailed(PullOutcome.REFUSED, "the source began with something else than its grant")

    def _check(self, granted: worker_pb2.BlocksGranted, arrival: Arrival) -> None:
        """Believe nothing of what the source says that can be checked. Raises PeerFailed."""
        party = self._party
        mismatch = party.identity.mismatch(read_identity(granted.identity))
        expected = granted.blocks * party.identity.block_size, block_bytes(party.pool)
        told = granted.tokens, granted.block_bytes
        if not mismatch and granted.blocks > len(arrival.missing):
            mismatch = f"blocks: asked for {len(arrival.missing)}, granted {granted.blocks}"
        if not mismatch and told != expected:
            mismatch = f"tokens, block_bytes: must be {expected}, are {told}"
        bounded = granted.chunk_blocks > 0 and (granted.chunk_blocks - 1) * told[1] < MAX_CHUNK_BYTES
        if not mismatch and (granted.backend not in party.maker.backends() or not bounded):
            mismatch = f"backend, chunk_blocks: are {granted.backend!r} and {granted.chunk_blocks}"
        if mismatch:
            raise PeerFailed(PullOutcome.REFUSED, mismatch)

    def _receive(
        self,
        lane: Lane,
        plan: ChannelPlan,
        cargo: Cargo,
        pace: Pace,
        arrived: Callable[[int], None],
    ) -> None:
        try:
            if not lane.open:
                make = self._party.maker.make
                lane.channel, lane.plan = make(plan, RECEIVER, pace.next_limit(), pace.stopped), plan
            assert lane.channel is not None
            lane.channel.receive(self._party.pool, cargo, pace, arrived)
        except BaseException:
            lane.close()
            raise
