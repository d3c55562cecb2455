"""The official `anthropic` client's tour, unmodified, against a cluster on a real model."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic_tour import STEPS, Step, Visitor

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
async def test_the_official_client_makes_its_tour(cluster: Any, step: Step) -> None:
    async with anthropic.AsyncAnthropic(base_url=cluster.http, api_key="none") as claude:
        (model, *_) = [model.id async for model in claude.models.list()]
        await step(Visitor(claude, model, block=16))
