"""The blocks of one chain over a channel, chunk by chunk, each under a seal.

A chunk is a few MiB of blocks. Before its blocks goes its seal, a digest of the transfer's nonce, the chunk's
number and the hashes of its blocks: what arrives under another seal than the expected one is somebody else's,
and is never registered. Two chunks are on their way at a time.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvhive.proto.block_hash import BlockHash
from kvhive.worker.transfer_channel import ChannelBroken, PairChannel
from kvhive.worker.transfer_staging import SLOTS, Staging

SEAL_BYTES = 32


class TransferStopped(Exception):
    """The transfer was given up between two chunks."""


@dataclass(frozen=True, slots=True)
class Cargo:
    """What travels, and how it is cut. Equal on both sides but for the block ids."""

    nonce: bytes
    hashes: Sequence[BlockHash]
    blocks: Sequence[int]
    """Where each hash's block is, or is to be, in this side's pool."""
    chunk_blocks: int

    def chunks(self) -> list[range]:
        """Return the places of each chunk's blocks."""
        total, size = len(self.hashes), self.chunk_blocks
        return [range(begin, min(begin + size, total)) for begin in range(0, total, size)]

    def seal(self, chunk: range) -> torch.Tensor:
        """Return the digest that goes before a chunk."""
        digest = hashlib.sha256(self.nonce + chunk.start.to_bytes(8, "little"))
        for place in chunk:
            digest.update(self.hashes[place])
        return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


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


def send(channel: PairChannel, staging: Staging, cargo: Cargo, pace: Pace) -> None:
    """Send everything. Raises ChannelBroken or TransferStopped; in both cases the channel is to be closed."""
    pending: deque[list[Any]] = deque()
    began, sent = time.monotonic() + pace.delay_s, 0
    try:
        with staging.stream():
            for number, chunk in enumerate(cargo.chunks()):
                if len(pending) == SLOTS:
                    channel.wait(pending.popleft(), pace.next_limit())
                _throttle(pace, began, sent)
                pace.next_limit()
                messages = staging.outgoing(number % SLOTS, [cargo.blocks[place] for place in chunk])
                pending.append(channel.begin([cargo.seal(chunk).to(channel.device), *messages]))
                sent += sum(message.numel() for message in messages)
            while pending:
                channel.wait(pending.popleft(), pace.next_limit())
        _throttle(pace, began, sent)
    finally:
        pending.clear()  # who catches the error keeps this frame, and must not keep what is in flight


def receive(
    channel: PairChannel, staging: Staging, cargo: Cargo, pace: Pace, arrived: Callable[[int], None]
) -> None:
    """Receive everything, and call `arrived` with the number of blocks that are in the pool by then.

    Raises as `send` does, and ChannelBroken for a seal that is not the expected one.
    """
    chunks = cargo.chunks()
    pending: deque[tuple[torch.Tensor, list[Any]]] = deque()

    def expect(number: int) -> None:
        seal = torch.empty(SEAL_BYTES, dtype=torch.uint8, device=channel.device)
        blocks = [cargo.blocks[place] for place in chunks[number]]
        pending.append((seal, channel.begin([seal, *staging.incoming(number % SLOTS, blocks)])))

    try:
        with staging.stream():
            for number in range(min(SLOTS, len(chunks))):
                expect(number)
            for number, chunk in enumerate(chunks):
                seal, works = pending.popleft()
                channel.wait(works, pace.next_limit())
                if not torch.equal(seal.cpu(), cargo.seal(chunk)):
                    raise ChannelBroken(f"chunk {number} has another seal than expected")
                staging.settle(number % SLOTS, [cargo.blocks[place] for place in chunk])
                arrived(chunk.stop)
                if number + SLOTS < len(chunks):
                    expect(number + SLOTS)
    finally:
        pending.clear()


def _throttle(pace: Pace, began: float, sent: int) -> None:
    """Wait until this much may have been sent."""
    due = began + (sent / pace.bytes_per_s if pace.bytes_per_s else 0.0)
    while (left := min(due, pace.deadline) - time.monotonic()) > 0 and not pace.stopped.is_set():
        pace.stopped.wait(min(left, 0.05))
