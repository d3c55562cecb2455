"""One guard before every HTTP route and every RPC, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pytest
from google.protobuf import empty_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from http_door import HEAD, say
from prometheus_client import CollectorRegistry
from scripted_frontend import ScriptedFrontend

from kvhive.proto.config import RouterConfig
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.auth.cluster_secret import Namespaces
from kvhive.router.auth.guard import ADMIN_PATHS, Guard
from kvhive.router.auth.key_list import KeyList, key_digest
from kvhive.router.auth.keyed_frontend import KeyedFrontend
from kvhive.router.auth.principal import OPERATOR, Principal
from kvhive.router.doors import Doors, RouterEndpoints
from kvhive.router.grpc_service import SERVICE_NAME, InferenceService
from kvhive.router.http_app import create_app

ALICE, ADMIN, OPERATORS = "kvh-alice", "kvh-admin", "kvh-operator"
KEYS = KeyList(
    {key_digest(ALICE): Principal("alice", max_priority=2), key_digest(ADMIN): Principal("root", admin=True)}
)


class Open:
    """Guarded doors that are open."""

    def __init__(self, frontend: ScriptedFrontend, app: Any, guard: Guard, where: RouterEndpoints) -> None:
        self.frontend = frontend
        self.app = app
        self.guard = guard
        self.where = where


@pytest.fixture
async def doors() -> AsyncIterator[Open]:
    frontend = ScriptedFrontend()
    keyed = KeyedFrontend(frontend, Namespaces("token"))
    guard = Guard(lambda: KEYS, OPERATORS)
    app = create_app(keyed, CollectorRegistry())
    both = Doors(RouterConfig(), InferenceService(keyed, pb.GetClusterResponse), app, guard)
    yield Open(frontend, app, guard, await both.open())
    await both.close(0)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_every_route_wants_a_key_but_that_which_says_that_we_live(doors: Open) -> None:
    routes = [route.path.replace("{name:path}", "demo") for route in doors.app._everything.routes]
    assert len(routes) >= 7
    unknown = [
        "/",
        "/docs",
        "/v1/messages",
        "/metrics/",
        "//metrics",
        "/%6detrics",
        "/healthz/x",
        "/healthz/",
    ]
    async with httpx.AsyncClient(base_url=doors.where.http) as http:
        for path in {*routes, *unknown} - {"/healthz"}:
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                answer = await http.request(method, path)
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
            answer = await http.get(path, headers=bearer(OPERATORS))
            assert answer.status_code in (200, 307, 404, 405), path
        assert (await http.get("/healthz")).text == "ok"
    assert doors.guard.refused["no_key"] == 4 * len({*routes, *unknown} - {"/healthz"})


async def call(channel: grpc.aio.Channel, method: str, key: str = "") -> grpc.StatusCode:
    """Call any method with an empty message."""
    metadata = (("x-api-key", key),) if key else ()
    stream = channel.unary_stream(method, empty_pb2.Empty.SerializeToString)
    try:
        async for _ in stream(empty_pb2.Empty(), metadata=metadata, timeout=5):
            break
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_every_rpc_wants_a_key_but_health(doors: Open) -> None:
    methods = [
        f"/{SERVICE_NAME}/{method.name}" for method in pb.DESCRIPTOR.services_by_name["Inference"].methods
    ]
    reflection = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    methods += [f"/{reflection.full_name}/{method.name}" for method in reflection.methods]
    methods += ["/nobody/Knows", "/grpc.health.v1.Healthy/Check"]
    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    async with grpc.aio.insecure_channel(doors.where.grpc) as channel:
        for method in methods:
            assert await call(channel, method) == unauthenticated, method
            assert await call(channel, method, "kvh-guess") == unauthenticated, method
            assert await call(channel, method, OPERATORS) != unauthenticated, method
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())
        await health.Watch(health_pb2.HealthCheckRequest()).read()
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
        metadata = (("authorization", f"bearer {ALICE}"),)
        answers = [answer async for answer in reflect.ServerReflectionInfo(iter([ask]), metadata=metadata)]
        assert SERVICE_NAME in {s.name for s in answers[0].list_services_response.service}


async def test_what_tells_of_everybody_wants_an_admins_key(doors: Open) -> None:
    async with (
        httpx.AsyncClient(base_url=doors.where.http) as http,
        grpc.aio.insecure_channel(doors.where.grpc) as channel,
    ):
        for key, status, code in (
            (ALICE, 403, grpc.StatusCode.PERMISSION_DENIED),
            (ADMIN, 200, grpc.StatusCode.OK),
            (OPERATORS, 200, grpc.StatusCode.OK),
        ):
            assert (await http.get("/metrics", headers=bearer(key))).status_code == status
            assert await call(channel, f"/{SERVICE_NAME}/GetCluster", key) == code
        error = (await http.get("/metrics", headers=bearer(ALICE))).json()["error"]
        assert error["code"] == "permission_denied" and "'alice'" in error["message"]
    assert {"/metrics", f"/{SERVICE_NAME}/GetCluster"} == ADMIN_PATHS


async def test_a_key_is_its_requests_tenant_and_namespace_whatever_they_say(doors: Open) -> None:
    salt = Namespaces("token").salt(Principal("alice"), "pepper")
    async with grpc.aio.insecure_channel(doors.where.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(
            text="say a", tenant="bob", cache_salt="pepper", priority=7, cache_key="k"
        )
        metadata = (("authorization", f"Bearer {ALICE}"),)
        assert [r async for r in stub.Generate(request, metadata=metadata)][-1].HasField("finished")
    async with openai.AsyncOpenAI(base_url=f"{doors.where.http}/v1", api_key=ALICE, max_retries=0) as client:
        options: Any = say("say a", user="bob", extra_body={"cache_salt": "pepper", "priority": -4})
        await client.chat.completions.create(**options)
        stream = await client.chat.completions.create(**options, stream=True)
        assert [chunk async for chunk in stream]
    seen = [(r.tenant, r.cache_salt, r.priority) for r in doors.frontend.requests]
    assert seen == [("alice", salt, 2), ("alice", salt, -4), ("alice", salt, -4)]
    assert doors.frontend.requests[0].cache_key == "k"


async def test_a_salt_that_is_too_long_is_refused_as_ever(doors: Open) -> None:
    async with httpx.AsyncClient(base_url=doors.where.http, headers=bearer(ALICE)) as http:
        for salt in ("x" * 257, "\ud800"):
            body = json.dumps(say("say a", cache_salt=salt))
            answer = await http.post("/v1/chat/completions", content=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


async def test_the_official_clients_know_what_is_wrong(doors: Open) -> None:
    async with openai.AsyncOpenAI(base_url=f"{doors.where.http}/v1", api_key="guess", max_retries=0) as ours:
        with pytest.raises(openai.AuthenticationError) as refused:
            await ours.models.list()
        assert refused.value.code == "invalid_api_key"
    async with anthropic.AsyncAnthropic(base_url=doors.where.http, api_key="guess", max_retries=0) as theirs:
        with pytest.raises(anthropic.AuthenticationError) as denied:
            await theirs.messages.create(max_tokens=1, messages=[], model="m")
        assert denied.value.body == {  # type: ignore[comparison-overlap]
            "type": "error",
            "error": {"type": "authentication_error", "message": "this API key is not known"},
            "request_id": None,
        }
        with pytest.raises(anthropic.AuthenticationError) as denied:  # a path of both dialects
            await theirs.models.list()
        assert denied.value.type == "authentication_error"


async def test_who_is_not_let_in_is_told_before_a_byte_of_the_body(doors: Open) -> None:
    """Over gRPC before any message: the call is over although the client has sent none."""
    host, _, port = doors.where.http.rpartition("//")[2].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HEAD % 10_000_000)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401") and b"connection: close" in head.lower()
    await reader.read()
    writer.close()
    async with grpc.aio.insecure_channel(doors.where.grpc) as channel:
        silent = channel.stream_stream(f"/{SERVICE_NAME}/Generate")()
        assert await silent.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_request_that_came_past_the_guard_opens_nobodys_cache() -> None:
    frontend = ScriptedFrontend()
    app = create_app(KeyedFrontend(frontend, Namespaces("token")), CollectorRegistry())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        assert (await http.post("/v1/chat/completions", json=say("say a"))).status_code == 500
    assert frontend.requests == []
    assert OPERATOR.name not in {holder.name for holder in KEYS.by_digest.values()}
