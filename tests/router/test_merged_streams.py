"""Several streams read as one: nothing lost, the first one leads, closing closes them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from kvhive.router.merged_streams import merged


class Source:
    """A stream that says when it began and ended."""

    def __init__(self, items: list[int], error: Exception | None = None, hangs: bool = False) -> None:
        self.items, self.error, self.hangs = items, error, hangs
        self.began = self.ended = False

    async def stream(self) -> AsyncGenerator[int, None]:
        self.began = True
        try:
            for item in self.items:
                await asyncio.sleep(0)
                yield item
            if self.error:
                raise self.error
            if self.hangs:
                await asyncio.Event().wait()
        finally:
            self.ended = True


async def read(*sources: Source) -> list[tuple[int, int]]:
    async with aclosing(merged([source.stream() for source in sources])) as items:
        return [item async for item in items]


async def test_every_item_comes_once_and_each_streams_in_order() -> None:
    items = await read(Source([1, 2, 3]), Source([]), Source([7, 8]), Source([9]))
    assert {i: [item for at, item in items if at == i] for i in range(4)} == {
        0: [1, 2, 3],
        1: [],
        2: [7, 8],
        3: [9],
    }
    assert await read() == [] and await read(Source([])) == []


async def test_the_others_begin_when_the_first_has_brought_something_or_ended() -> None:
    sources = [Source([], hangs=True), Source([1])]
    reader = asyncio.create_task(read(*sources))
    await asyncio.sleep(0.05)
    assert sources[0].began and not sources[1].began
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert await read(Source([]), Source([1])) == [(1, 1)]


async def test_streams_of_different_work_begin_together() -> None:
    sources = [Source([], hangs=True), Source([1], hangs=True)]
    stream = merged([source.stream() for source in sources], first_alone=False)
    assert await anext(stream) == (1, 1)
    await stream.aclose()
    assert await anext(merged([], first_alone=False), None) is None


async def test_an_error_ends_all() -> None:
    sources = [Source([1], hangs=True), Source([2], ValueError("x")), Source([], hangs=True)]
    with pytest.raises(ValueError, match="x"):
        await read(*sources)
    assert all(source.ended for source in sources)


async def test_closing_ends_all_at_any_moment() -> None:
    for taken in range(1, 4):
        sources = [Source([1, 2], hangs=True), Source([3, 4], hangs=True)]
        stream = merged([source.stream() for source in sources])
        for _ in range(taken):
            await anext(stream)
        await stream.aclose()
        assert all(source.ended == source.began for source in sources)
