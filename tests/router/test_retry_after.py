"""What both doors say of a refusal: when to come again, in words that official clients understand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
import httpx
import openai
import pytest
from http_door import post, say
from scripted_frontend import ScriptedFrontend

from kvhive.proto.errors import Overloaded
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.frontend import GenerationEvent
from kvhive.router.grpc_service import InferenceService
from kvhive.router.request import GenerateRequest

WAIT_S = 1.3
"""More than the half second after which OpenAI's client comes back when it is told nothing."""


class FullAtFirst(ScriptedFrontend):
    """Refuses the first request, and remembers when each of them came."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[float] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.came.append(asyncio.get_running_loop().time())
        if len(self.came) == 1:
            raise Overloaded("full", cause="queues_full", retry_after_s=WAIT_S)
        async for event in super().generate(request):
            yield event


@pytest.fixture
def frontend() -> FullAtFirst:
    return FullAtFirst()


@pytest.fixture
async def stub(frontend: FullAtFirst) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    server = grpc.aio.server()
    service = InferenceService(frontend, pb.GetClusterResponse)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)
    await server.stop(0)


async def test_the_official_client_waits_as_long_as_it_is_told_and_is_served(
    frontend: FullAtFirst, openai_client: openai.AsyncOpenAI
) -> None:
    patient = openai_client.with_options(max_retries=1)
    answer = await patient.chat.completions.create(**say("say hello"))
    assert answer.choices[0].message.content == "hello"
    first, second = frontend.came
    assert second - first >= WAIT_S - 0.01


async def test_http_says_it_in_seconds_and_in_milliseconds(http: httpx.AsyncClient) -> None:
    """Whole seconds for everybody, rounded up: coming too early is of no use."""
    response = await post(http, "say hello")
    assert response.status_code == 429 and response.json()["error"]["code"] == "overloaded"
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("2", "1300")


async def test_grpc_says_it_in_its_trailing_metadata(stub: inference_pb2_grpc.InferenceStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        [r async for r in stub.Generate(pb.GenerateRequest(text="say a"))]
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(refusal.value.trailing_metadata() or ())["retry-after-ms"] == "1300"
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        [r async for r in stub.Generate(pb.GenerateRequest(text="refuse bad"))]
    assert "retry-after-ms" not in dict(refusal.value.trailing_metadata() or ())


async def test_a_calls_deadline_and_its_tenant_arrive(
    frontend: FullAtFirst, stub: inference_pb2_grpc.InferenceStub
) -> None:
    frontend.came.append(0.0)
    [r async for r in stub.Generate(pb.GenerateRequest(text="say a", tenant="acme"), timeout=30)]
    [r async for r in stub.Generate(pb.GenerateRequest(text="say a"))]
    with_deadline, without = frontend.requests
    assert with_deadline.tenant == "acme" and with_deadline.timeout_s is not None
    assert 20.0 < with_deadline.timeout_s <= 30.0
    assert (without.tenant, without.timeout_s) == ("", None)


async def test_openais_user_is_the_tenant(frontend: FullAtFirst, http: httpx.AsyncClient) -> None:
    """Or what has taken its place in the dialect; a field that is no name is refused by its own."""
    frontend.came.append(0.0)
    await post(http, "say a", user="acme")
    await post(http, "say a", safety_identifier="other")
    await http.post("/v1/completions", json={"model": "demo", "prompt": "say a", "user": "third"})
    assert [request.tenant for request in frontend.requests] == ["acme", "other", "third"]
    response = await post(http, "say a", user=5)
    assert response.status_code == 400 and response.json()["error"]["param"] == "user"
    response = await post(http, "say a", user="x" * 257)
    assert response.status_code == 400 and response.json()["error"]["param"] == "user"
