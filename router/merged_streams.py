"""Several streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(
    streams: Sequence[AsyncGenerator[T, None]], first_alone: bool = True
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the stream, item) as items come, one read ahead per stream; the items are never None.

    first_alone: begin the others when the first one has brought something, or has ended, for what it computes
        and caches first is what they would all compute

    The first error ends everything. Closing this closes all streams.
    """
    if len(streams) == 1:  # nothing to merge: no task between an item and its reader, and nothing read ahead
        async with aclosing(streams[0]) as only:
            async for each in only:
                yield 0, each
        return
    tasks: dict[asyncio.Task[T | None], int] = {}
    begun = 0
    try:
        while tasks or begun < len(streams):
            for index in range(begun, 1 if first_alone and not begun else len(streams)):
                tasks[asyncio.create_task(_next(streams[index]))] = index
                begun = index + 1
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, item = tasks.pop(task), task.result()
                if item is not None:
                    yield index, item
                    tasks[asyncio.create_task(_next(streams[index]))] = index
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T, None]) -> T | None:
    return await anext(stream, None)
