"""The official `openai` client, unmodified, on its tour of a real cluster."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai_tour import ANYWHERE, WITH_A_MODEL, Tour

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

BLOCK = 16


@pytest.mark.parametrize("visit", [*ANYWHERE, *WITH_A_MODEL], ids=lambda visit: visit.__name__)
async def test_the_tour(cluster: Any, visit: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0) as client:
        tour = Tour(client, BLOCK)
        await tour.models()
        await visit(tour)


def test_the_blocking_client_works_too(cluster: Any) -> None:
    with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0) as client:
        fields: Any = {
            "model": client.models.list().data[0].id,
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 5,
            "temperature": 0,
        }
        text = client.chat.completions.create(**fields).choices[0].message.content
        pieces = [
            c.choices[0].delta.content or "" for c in client.chat.completions.create(**fields, stream=True)
        ]
    assert text and "".join(pieces) == text
