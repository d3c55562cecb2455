"""The official client on its tour of open doors, in front of simulated workers; and its own error classes."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from http_door import say
from open_doors import open_doors
from openai_tour import ANYWHERE, Tour

from kvhive.scripts.embedded_redis import EmbeddedRedis

BLOCK = 4


async def test_the_tour(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with open_doors(redis_server.url, demo_gguf) as doors:
        tour = Tour(doors.openai, BLOCK)
        await tour.models()
        for visit in ANYWHERE:
            await visit(tour)
        await doors.rig.idle()


@pytest.mark.parametrize(
    ("content", "error", "status", "code"),
    [
        ("refuse bad", openai.BadRequestError, 400, None),
        ("refuse busy", openai.RateLimitError, 429, "overloaded"),
        ("refuse down", openai.InternalServerError, 503, "unavailable"),
        ("refuse late", openai.InternalServerError, 504, "timeout"),
        ("refuse broken", openai.InternalServerError, 500, None),
    ],
)
async def test_refusals_are_the_clients_own_errors(
    openai_client: openai.AsyncOpenAI,
    content: str,
    error: type[openai.APIStatusError],
    status: int,
    code: str | None,
) -> None:
    with pytest.raises(error) as caught:
        await openai_client.chat.completions.create(**say(content))
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert ("retry-after" in caught.value.response.headers) == (status in (429, 503))


async def test_a_client_that_may_retry_comes_again_when_it_is_told_to(port: int) -> None:
    url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=1) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(**say("refuse soon"))
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "1"


async def test_an_error_in_a_stream_is_raised(openai_client: openai.AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(**say("break a"), stream=True)
    with pytest.raises(openai.APIError, match="the worker was lost"):
        async for _ in stream:
            pass
