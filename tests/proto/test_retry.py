"""A loop that fails waits longer and longer within a bound, and a lost cancellation still ends it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvhive.proto.retry import FIRST_BACKOFF_S, MAX_BACKOFF_S, backoff_s, raise_if_cancelled


def test_waits_double_up_to_the_longest_and_never_agree() -> None:
    """Between half and all of 50 ms, 100 ms, ... 1 s: many workers do not come back at the same moment."""
    for failures in (0, 1, 2, 5, 6, 7, 10**6):
        longest = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(max(0, failures - 1), 20))
        waits = [backoff_s(failures) for _ in range(200)]
        assert longest / 2 <= min(waits) < 0.6 * longest < 0.9 * longest < max(waits) <= longest


async def test_a_swallowed_cancellation_is_raised_again() -> None:
    async def swallows() -> None:
        while True:
            raise_if_cancelled()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    task = asyncio.create_task(swallows())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(1):
            await task


async def test_a_task_that_goes_on_is_left_alone() -> None:
    raise_if_cancelled()
