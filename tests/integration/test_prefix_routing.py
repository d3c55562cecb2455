"""A request lands where its prefix is, and what it reports is what the pool's arithmetic says."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from typing import Any

import pytest
from inference import Client, by_tokens

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def prefix(seed: int, length: int) -> list[int]:
    return [1000 + (seed * 7919 + i * 31) % 40_000 for i in range(length)]


async def test_a_second_user_hits_the_shared_blocks_while_the_first_still_decodes(cluster: Any) -> None:
    """Exactly the full shared blocks; another cache_salt gets 0; the same one hits (positive control)."""
    shared, salt = prefix(1, 512), secrets.token_hex(4)
    async with Client(cluster.grpc) as client:
        decoding = asyncio.Event()
        first = asyncio.create_task(
            client.generate(by_tokens([*shared, 5, 6, 7], 60, cache_salt=salt), first_token=decoding)
        )
        await decoding.wait()
        second = await client.generate(by_tokens([*shared, 8, 9], 2, cache_salt=salt))
        assert not first.done(), "the first was meant to be decoding still"
        assert second.cached == 512
        assert (await first).cached == 0
        other = await client.generate(by_tokens([*shared, 8, 9], 2, cache_salt=salt + "x"))
        assert other.cached == 0
        again = await client.generate(by_tokens([*shared, 8, 9], 2, cache_salt=salt))
        assert again.cached == 512
        assert again.usage is not None and again.usage.reachable_tokens == 512
        assert again.usage.route_reason == "prefix"


async def test_forty_requests_of_four_groups_settle_and_use_both_workers(cluster: Any) -> None:
    """What a group shares is computed once: later requests find it, or pull it where that is faster."""
    salt, tail = secrets.token_hex(4), 10
    groups = {group: prefix(100 + group, 200 + 16 * group) for group in range(4)}
    homes: dict[int, set[str]] = defaultdict(set)
    async with Client(cluster.grpc) as client:
        for turn in range(10):

            async def one(group: int, turn: int = turn) -> None:
                tokens = [*groups[group], *(2 + turn for _ in range(tail))]
                result = await client.generate(by_tokens(tokens, 4, cache_salt=salt))
                assert result.usage is not None
                homes[group].add(result.usage.worker_id)
                shared = len(groups[group]) // 16 * 16
                found = result.found
                assert found == (shared if turn else 0), f"group {group}, turn {turn}"
                assert result.usage.written_tokens == len(tokens) // 16 * 16 - found

            await asyncio.gather(*(one(group) for group in groups))
    assert len(set.union(*homes.values())) == 2, homes


async def test_the_index_shows_what_the_pools_hold(cluster: Any) -> None:
    """At rest the mirror's count of blocks is each worker's own."""
    async with Client(cluster.grpc) as client:
        await client.generate(by_tokens(prefix(7, 100), 4, cache_salt=secrets.token_hex(4)))
        await client.until(
            lambda c: all(w.blocks.live == 0 and w.indexed_blocks == w.blocks.cached for w in c.workers),
            5.0,
            "equal",
        )
