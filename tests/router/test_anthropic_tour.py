"""The official client's tour against both doors of a router, over workers on a simulated model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import pytest
from anthropic_tour import STEPS, Visitor, a_required_tool, structured_output
from open_doors import open_doors
from router_rig import BLOCK

from kvhive.scripts.embedded_redis import EmbeddedRedis

NEED_A_MODEL = (a_required_tool, structured_output)
"""Steps that a simulated model cannot make: it obeys no grammar. tests/integration makes them."""


@pytest.fixture
async def visitor(redis_server: EmbeddedRedis, demo_gguf: Path) -> AsyncIterator[Visitor]:
    async with open_doors(redis_server.url, demo_gguf, blocks=1024) as doors:
        url = str(doors.openai.base_url).removesuffix("/v1/")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:
            model = doors.rig.dispatcher.models()[0].name
            yield Visitor(claude, model, BLOCK)


async def test_the_official_client_makes_its_tour(visitor: Visitor) -> None:
    """One test, as opening the doors takes longer than a step."""
    for step in STEPS:
        if step not in NEED_A_MODEL:
            await step(visitor)
