"""One worker's channels in one direction: a lane for each peer, made when needed, bounded in number."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from kvhive.worker.transfer_channel import Channel, ChannelPlan

MAX_LANES = 16
"""Peers whose channels are kept. Each has a socket; over gloo and NCCL a store connection and buffers."""


@dataclass(slots=True, eq=False)
class Lane:
    """One peer's channel. Whoever uses it has taken it from its Lanes."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: int = 0
    """By how many it is used or waited for."""
    epoch: int = 0
    """Of the peer that the channel leads to."""
    plan: ChannelPlan | None = None
    channel: Channel | None = None

    @property
    def open(self) -> bool:
        """Whether there is a channel that can be used."""
        return self.channel is not None and not self.channel.closed

    def close(self) -> None:
        """Give the channel up."""
        channel, self.channel, self.plan = self.channel, None, None
        if channel is not None:
            channel.close()


class Lanes:
    """By peer. Beyond the bound the one that was not used for longest goes, of those that nobody wants."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, Lane] = OrderedDict()

    async def take(self, peer: str) -> Lane:
        """Wait for a peer's lane, whatever is in it, and have it until `give_back`."""
        lane = self._lanes.setdefault(peer, Lane())
        self._lanes.move_to_end(peer)
        lane.wanted += 1
        for old in list(self._lanes)[:-MAX_LANES]:
            if not self._lanes[old].wanted:
                self._lanes.pop(old).close()
        try:
            await lane.turn.acquire()
        except BaseException:
            lane.wanted -= 1
            raise
        return lane

    def give_back(self, lane: Lane) -> None:
        """Let the next one have it."""
        lane.wanted -= 1
        lane.turn.release()

    def close(self) -> None:
        """Close every channel. Nobody uses them any more."""
        while self._lanes:
            self._lanes.popitem()[1].close()
