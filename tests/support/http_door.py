"""The HTTP door over a real socket, in front of a scripted Frontend."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry, Counter
from scripted_frontend import ScriptedFrontend

from kvhive.router.http_app import create_app
from kvhive.router.http_gateway import HttpServer

MAX_BODY = 200_000
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
def frontend() -> ScriptedFrontend:
    return ScriptedFrontend()


@pytest.fixture
async def port(frontend: ScriptedFrontend) -> AsyncIterator[int]:
    registry = CollectorRegistry()
    Counter("kvhive_things", "Things", registry=registry).inc(3)
    app = create_app(frontend, registry, MAX_BODY, now=lambda: 1234.5, timed_out=frontend.timeouts.append)
    server = HttpServer(app)
    yield await server.start("127.0.0.1", 0)
    await server.stop(0)


@pytest.fixture
async def http(port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
        yield client


@pytest.fixture
async def openai_client(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def say(content: str, **fields: Any) -> dict[str, Any]:
    """The body of a request with one message."""
    return {"model": "demo", "messages": [{"role": "user", "content": content}], **fields}


async def post(http: httpx.AsyncClient, content: str, **fields: Any) -> httpx.Response:
    """Send a request with one message."""
    return await http.post("/v1/chat/completions", json=say(content, **fields))


def events(text: str) -> list[Any]:
    """The events of a stream that has ended."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
