"""What a channel is: one direction between two workers, by which blocks go from pool to pool.

Backends, and where each lives: `tcp`, a connection that reads from one pool and writes into the other
(transfer_socket.py), between workers on CPUs; `nccl` and `gloo`, process groups of torch.distributed with
staging buffers (transfer_group.py), where a pool is on a GPU, and gloo wherever it is asked for.

A dead or hung peer is an error within the time that a chunk may take. A channel that has failed once is
closed and never used again: what was on its way in it belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvhive.worker.transfer_cargo import Cargo
from kvhive.worker.transfer_pace import Pace

SENDER, RECEIVER = 0, 1
"""The two ends, as ranks."""


class ChannelBroken(Exception):
    """The peer is gone, hung or never came; the channel is of no use any more."""


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """What both ends must agree on before there is a channel."""

    key: str
    """Both workers, both epochs and a nonce that nobody else knows."""
    store: str
    """host:port of the receiver's store, in which they meet."""
    backend: str
    """Of what the receiver can speak, what the sender chose."""


class Channel(Protocol):
    """One direction between two workers. One thread at a time; waiting releases the GIL.

    Whatever `send` and `receive` raise, the channel is to be closed then, by the same thread.
    """

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""

    def send(self, pool: torch.Tensor, cargo: Cargo, pace: Pace) -> None:
        """Send everything out of a pool `[blocks, ...]`, contiguous. Raises ChannelBroken, TransferStopped.

        When it returns nobody reads from the pool any more; whether all has arrived, only the peer knows.
        """

    def receive(self, pool: torch.Tensor, cargo: Cargo, pace: Pace, arrived: Callable[[int], None]) -> None:
        """Receive everything, and call `arrived` with the number of blocks that are in the pool by then.

        Raises as `send` does, and ChannelBroken for a seal that is not the expected one.
        """

    def close(self) -> None:
        """Tear it down; again does no harm. Afterwards nothing is written into a receiver's pool."""


def check_seal(number: int, seal: bytes, expected: bytes) -> None:
    """Raise ChannelBroken unless a chunk came under the seal that it must."""
    if seal != expected:
        raise ChannelBroken(f"chunk {number} has another seal than expected")
