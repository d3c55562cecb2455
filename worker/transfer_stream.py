"""The blocks of one chain over a channel, chunk by chunk, each under a seal.

A chunk is a few MiB of blocks. After its blocks goes its seal, a digest of the transfer's nonce, the chunk's
number and the hashes of its blocks: what arrives under another seal than the expected one is somebody else's,
and is never registered. Both sides compute it while the blocks are on their way, which is why it is last.
Several chunks are on their way at a time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvhive.worker.transfer_cargo import Cargo
from kvhive.worker.transfer_channel import ChannelBroken, PairChannel
from kvhive.worker.transfer_staging import Staging

SEAL_BYTES = 32


class TransferStopped(Exception):
    """The transfer was given up between two chunks."""


@dataclass(slots=True, eq=False)
class Pace:
    """The bounds of one transfer. Seconds are of `time.monotonic`."""

    deadline: float
    stall_s: float
    """Longest that one chunk may take."""
    stopped: threading.Event = field(default_factory=threading.Event)
    bytes_per_s: float = 0.0
    """For measurements: never faster than this; 0 is as fast as it goes."""
    delay_s: float = 0.0
    """For measurements: waited once, before the first chunk."""

    def next_limit(self) -> float:
        """Return how long the next chunk may take. Raises TransferStopped when it is not to come."""
        left = self.deadline - time.monotonic()
        if self.stopped.is_set() or left <= 0:
            raise TransferStopped("cancelled" if self.stopped.is_set() else "out of time")
        return min(left, self.stall_s)

    def last_limit(self) -> float:
        """Return how long a chunk may take of which nothing is left to do but to wait."""
        return min(max(self.deadline - time.monotonic(), 0.0), self.stall_s)


def send(channel: PairChannel, staging: Staging, cargo: Cargo, pace: Pace) -> None:
    """Send everything. Raises ChannelBroken or TransferStopped; in both cases the channel is to be closed."""
    pending: deque[list[Any]] = deque()
    began, sent = time.monotonic() + pace.delay_s, 0
    try:
        with staging.stream():
            loading = staging.load(cargo)
            for number, parcel in enumerate(cargo.parcels(loading.whole)):
                if len(pending) == loading.depth:
                    channel.wait(pending.popleft(), pace.next_limit())
                messages = loading.outgoing(number % loading.depth, parcel.parts)
                sent += sum(message.numel() for message in messages)
                _throttle(pace, began, sent)
                pace.next_limit()
                works = channel.begin(messages)
                if parcel.completes:
                    seal = torch.frombuffer(bytearray(cargo.seal(parcel.chunk)), dtype=torch.uint8)
                    works += channel.begin([seal.to(channel.device)])
                pending.append(works)
            while pending:  # who has all of it may hang up before this thread knows
                channel.wait(pending.popleft(), pace.last_limit())
    finally:
        pending.clear()  # who catches the error keeps this frame, and must not keep what is in flight


def receive(
    channel: PairChannel, staging: Staging, cargo: Cargo, pace: Pace, arrived: Callable[[int], None]
) -> None:
    """Receive everything, and call `arrived` with the number of blocks that are in the pool by then.

    Raises as `send` does, and ChannelBroken for a seal that is not the expected one.
    """
    pending: deque[tuple[torch.Tensor, list[Any]]] = deque()
    try:
        with staging.stream():
            loading = staging.load(cargo)
            parcels = cargo.parcels(loading.whole)

            def expect(number: int) -> None:
                parcel = parcels[number]
                works = channel.begin(loading.incoming(number % loading.depth, parcel.parts))
                seal = torch.empty(SEAL_BYTES * parcel.completes, dtype=torch.uint8, device=channel.device)
                if parcel.completes:
                    works += channel.begin([seal])
                pending.append((seal, works))

            for number in range(min(loading.depth, len(parcels))):
                expect(number)
            for number, parcel in enumerate(parcels):
                seal, works = pending.popleft()
                expected = cargo.seal(parcel.chunk) if parcel.completes else b""
                channel.wait(works, pace.next_limit())
                if bytes(seal.tolist()) != expected:
                    raise ChannelBroken(
                        f"chunk {parcel.chunk.start // cargo.chunk_blocks} has another seal than expected"
                    )
                loading.settle(number % loading.depth, parcel.parts)
                if parcel.completes:
                    arrived(parcel.chunk.stop)
                if number + loading.depth < len(parcels):
                    expect(number + loading.depth)
    finally:
        pending.clear()


def _throttle(pace: Pace, began: float, sent: int) -> None:
    """Wait until a slower network would have brought so much: what is sent then arrives at once."""
    due = began + (sent / pace.bytes_per_s if pace.bytes_per_s else 0.0)
    while (left := min(due, pace.deadline) - time.monotonic()) > 0 and not pace.stopped.is_set():
        pace.stopped.wait(min(left, 0.05))
