"""One drain: no new requests, the hot part of the cache to the survivors, streams end or move, all stops.

    close the door -> hand over -> wait for streams -> hand over what they left -> stop

All of it within the order's bound. Streams that still run then are cut off by the stop and go on at another
worker, where the router continues them. A worker that does not answer at the start is stopped without more
ado; one that misses an answer later has until its lease is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvhive.proto.errors import KvhiveError, Unavailable
from kvhive.proto.index_schema import WorkerRecord, WorkerState
from kvhive.scripts.hand_over import HandOver, HeldKeys, hand_over
from kvhive.scripts.worker_calls import WorkerCalls

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 60.0
LONGEST_TIMEOUT_S = 86_400.0
HAND_OVER_SHARE = 0.5
"""Of the bound: the first hand-over takes no more, so that streams get time to end, too."""
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """What was asked for."""

    worker_id: str
    timeout_s: float = DEFAULT_TIMEOUT_S
    hand_over: bool = True


@dataclass(slots=True)
class DrainProgress:
    """How far a drain is."""

    order: DrainOrder
    step: str = "closing the door"
    open_requests: int = 0
    moved_requests: int = 0
    """Requests that ran at the bound, and go on elsewhere."""
    handed: HandOver = field(default_factory=HandOver)
    note: str = ""
    """What did not go as it should."""
    done: bool = False

    def document(self) -> dict[str, Any]:
        """Return all of it in plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DrainMeans:
    """What a drain works with."""

    calls: WorkerCalls
    index: HeldKeys
    record: Callable[[str], WorkerRecord | None]
    """A worker as it is registered now."""
    heirs: Callable[[], Sequence[WorkerRecord]]
    """Those that may inherit now."""
    stop: Callable[[str], Awaitable[None]]
    """Ends a worker's actor for good."""


async def drain(order: DrainOrder, means: DrainMeans, progress: DrainProgress) -> None:
    """Drain a worker to its end, whatever fails on the way; how far it is stands in `progress`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + order.timeout_s
    progress.step, record = "closing the door", means.record(order.worker_id)
    try:
        if record is None:
            progress.note = "it is not registered, so there is nothing to hand over"
        else:
            progress.open_requests = await means.calls.set_state(record, WorkerState.DRAINING)
            await _empty(record, order, means, progress, deadline)
    except KvhiveError as error:
        progress.note = str(error)
    progress.moved_requests = progress.open_requests
    progress.step = "stopping"
    log.info("stopping worker_id=%s open=%d note=%s", order.worker_id, progress.open_requests, progress.note)
    await means.stop(order.worker_id)
    progress.step, progress.done = "gone", True


async def _empty(
    record: WorkerRecord, order: DrainOrder, means: DrainMeans, progress: DrainProgress, deadline: float
) -> None:
    """Hand over, let streams end, and hand over what those have left."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    if order.hand_over:
        await _hand_over(record, means, progress, now + HAND_OVER_SHARE * (deadline - now))
    progress.step = "waiting for streams"
    ran = 0
    while progress.open_requests and loop.time() < deadline:
        ran = max(ran, progress.open_requests)
        await asyncio.sleep(min(_POLL_S, max(0.0, deadline - loop.time())))
        progress.open_requests = await _still_open(record, means, progress)
    if order.hand_over and ran and loop.time() < deadline:
        await _hand_over(record, means, progress, deadline)


async def _hand_over(record: WorkerRecord, means: DrainMeans, progress: DrainProgress, until: float) -> None:
    progress.step = "handing over"
    loop = asyncio.get_running_loop()
    heirs = [heir for heir in means.heirs() if heir.worker_id != record.worker_id]
    try:
        async with asyncio.timeout(max(0.0, until - loop.time())):
            await hand_over(record, heirs, means.calls, means.index, progress.handed)
    except TimeoutError:
        progress.handed.error = "the time was over"
    except Unavailable as error:  # blocks do not move here: then there is no hand-over
        progress.handed.error = str(error)
    progress.open_requests = await _still_open(record, means, progress)


async def _still_open(record: WorkerRecord, means: DrainMeans, progress: DrainProgress) -> int:
    """Return how many requests are open, as of before when it is silent. Raises Unavailable when it is gone.

    Asked for by closing the door again: that answer counts what a step under way has not taken in yet.
    """
    try:
        return await means.calls.set_state(record, WorkerState.DRAINING)
    except Unavailable as error:
        now = means.record(record.worker_id)
        if now is None or now.epoch != record.epoch:
            raise
        log.warning("silent for a moment while it drains worker_id=%s: %s", record.worker_id, error)
        return progress.open_requests
