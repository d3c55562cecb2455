"""Anthropic's dialect over a real socket, in front of a Frontend that says what a test tells it to."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest
from prometheus_client import CollectorRegistry
from scripted_frontend import USAGE, ScriptedFrontend

from kvhive.router.frontend import Delta, Finished, GenerationEvent, Started, ToolCallDelta, Usage
from kvhive.router.http_app import create_app
from kvhive.router.http_gateway import HttpServer
from kvhive.router.request import GenerateRequest, Prompt, validate_request

MAX_BODY = 200_000
HEAD = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


class SpeakingFrontend(ScriptedFrontend):
    """Says what `script` has, if it has anything; else does what the prompt's words ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.script: Sequence[GenerationEvent] = ()
        self.usage: Usage = USAGE
        self.prewarmed: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        if not self.script:
            async for event in super().generate(request):
                yield event
            return
        validate_request(request, 1000, 8192)
        self.requests.append(request)
        yield Started(request.request_id, "w1", 5)
        for event in self.script:
            yield replace(event, usage=self.usage) if isinstance(event, Finished) else event

    async def tokenize(self, prompt: Prompt, model: str = "", cache_salt: str = "") -> list[int]:
        validate_request(GenerateRequest(prompt, model=model), 1000, 8192)
        return await super().tokenize(prompt, model, cache_salt)

    async def prewarm(self, request: GenerateRequest, workers: int) -> list[Usage]:
        self.prewarmed.append(request)
        return await super().prewarm(request, workers)


def call_script() -> list[GenerationEvent]:
    """Text, then two calls of tools, as a model would say them."""
    return [
        Delta("Let me ", (1,)),
        Delta("look.", (2,)),
        Delta("", (3,), tool_calls=(ToolCallDelta(0, "call_a", "weather"),)),
        Delta("", (4,), tool_calls=(ToolCallDelta(0, arguments='{"city": '),)),
        Delta("", (5,), tool_calls=(ToolCallDelta(0, arguments='"Zürich"}'),)),
        Delta("", (6,), tool_calls=(ToolCallDelta(1, "call_b", "clock", "{}"),)),
        Finished("tool_calls", USAGE),
    ]


@pytest.fixture
def speaker() -> SpeakingFrontend:
    return SpeakingFrontend()


@pytest.fixture
async def claude_port(speaker: SpeakingFrontend) -> AsyncIterator[int]:
    app = create_app(speaker, CollectorRegistry(), MAX_BODY, timed_out=speaker.timeouts.append)
    server = HttpServer(app)
    yield await server.start("127.0.0.1", 0)
    await server.stop(0)


@pytest.fixture
async def claude_http(claude_port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{claude_port}", timeout=10) as client:
        yield client


@pytest.fixture
async def claude(claude_port: int) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = f"http://127.0.0.1:{claude_port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def say(content: Any, **fields: Any) -> dict[str, Any]:
    """The body of a request with one message."""
    return {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": content}], **fields}


async def post(http: httpx.AsyncClient, content: Any, **fields: Any) -> httpx.Response:
    """Send a request with one message."""
    return await http.post("/v1/messages", content=json.dumps(say(content, **fields)).encode())


def events(text: str) -> list[Any]:
    """The data of a stream's events, each of which has the name of its type."""
    found = []
    for part in text.split("\n\n"):
        if part:
            name, data = part.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found
