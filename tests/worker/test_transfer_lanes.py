"""More peers than channels are kept for: none is closed under who uses it, or is about to."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvhive.worker.transfer_channel import Channel
from kvhive.worker.transfer_lanes import MAX_LANES, Lane, Lanes


class FakeChannel:
    """Knows whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


async def connected(lanes: Lanes, peer: str) -> Lane:
    lane = await lanes.take(peer)
    if not lane.open:
        lane.channel = cast(Channel, FakeChannel())
    return lane


async def visit(lanes: Lanes, *peers: object) -> list[Lane]:
    visited = []
    for peer in peers:
        lane = await connected(lanes, str(peer))
        lanes.give_back(lane)
        visited.append(lane)
    return visited


async def test_of_more_peers_than_are_kept_the_one_unused_for_longest_loses_its_channel() -> None:
    lanes = Lanes()
    visited = await visit(lanes, *range(MAX_LANES))
    await visit(lanes, 0, "one more")
    assert [number for number, lane in enumerate(visited) if not lane.open] == [1]


async def test_a_lane_that_is_used_or_waited_for_is_never_closed() -> None:
    """Also in the moment when one has let go and the next one has not been told yet."""
    lanes = Lanes()
    lane = await connected(lanes, "used")
    waiting = asyncio.create_task(lanes.take("used"))
    await asyncio.sleep(0)
    await visit(lanes, *range(2 * MAX_LANES))
    assert lane.open
    crowd = asyncio.create_task(visit(lanes, *range(100, 100 + 2 * MAX_LANES)))
    lanes.give_back(lane)
    await crowd
    assert await waiting is lane and lane.open
    lanes.give_back(lane)
    await visit(lanes, *range(2 * MAX_LANES))
    assert not lane.open


async def test_who_stops_waiting_for_a_lane_leaves_nothing_behind() -> None:
    lanes = Lanes()
    lane = await connected(lanes, "used")
    waiting = asyncio.create_task(lanes.take("used"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert lane.wanted == 1
    lanes.give_back(lane)
    assert not lane.turn.locked() and lane.wanted == 0
