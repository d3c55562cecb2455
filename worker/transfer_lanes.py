"""One worker's channels in one direction: a lane for each peer, made when needed, bounded in number."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from kvhive.worker.transfer_channel import ChannelPlan, PairChannel
from kvhive.worker.transfer_staging import Staging

MAX_LANES = 16
"""Peers whose channels are kept. Each has two staging buffers at most, two sockets and a store connection."""


@dataclass(slots=True, eq=False)
class Lane:
    """One peer's channel, with its buffers. Whoever uses it holds `turn`."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    epoch: int = 0
    """Of the peer that the channel leads to."""
    plan: ChannelPlan | None = None
    channel: PairChannel | None = None
    _staging: Staging | None = None
    _chunk_blocks: int = 0

    @property
    def open(self) -> bool:
        """Whether there is a channel that can be used."""
        return self.channel is not None and not self.channel.closed

    def staging(self, pool: torch.Tensor, chunk_blocks: int) -> Staging:
        """Return the buffers for chunks of this size."""
        assert self.channel is not None, "a lane has buffers while it has a channel"
        if self._staging is None or self._chunk_blocks != chunk_blocks:
            self._staging = Staging(pool, chunk_blocks, self.channel.device.type == "cpu")
            self._chunk_blocks = chunk_blocks
        return self._staging

    def close(self) -> None:
        """Give the channel up, and its buffers: something may be on the way into them."""
        channel, self.channel, self.plan, self._staging = self.channel, None, None, None
        if channel is not None:
            channel.close()


class Lanes:
    """By peer. At the bound the one that was not used for longest goes, if nobody is using it."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, Lane] = OrderedDict()

    def of(self, peer: str) -> Lane:
        """Return a peer's lane, whatever is in it."""
        lane = self._lanes.setdefault(peer, Lane())
        self._lanes.move_to_end(peer)
        for old in list(self._lanes)[:-MAX_LANES]:
            if not self._lanes[old].turn.locked():
                self._lanes.pop(old).close()
        return lane

    def close(self) -> None:
        """Close every channel. Nobody uses them any more."""
        while self._lanes:
            self._lanes.popitem()[1].close()
