"""Errors over gRPC, as Google's own library reads them: the field, why, and when to come again."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2
from grpc_door import grpc_door
from grpc_status import rpc_status
from scripted_frontend import REFUSALS, ScriptedFrontend

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.auth.principal import OPERATOR, Principal, asking
from kvhive.router.grpc_errors import MAX_DETAIL_BYTES
from kvhive.router.grpc_service import REQUEST_TYPES, InferenceService
from kvhive.router.grpc_wire_counts import wire_limits
from kvhive.router.malformed_message import MalformedMessageGuard


@pytest.fixture
async def address(frontend: ScriptedFrontend) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[MalformedMessageGuard(REQUEST_TYPES, wire_limits(100))])
    inference_pb2_grpc.add_InferenceServicer_to_server(
        InferenceService(frontend, pb.GetClusterResponse), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def refused(address: str, method: str, request: Any) -> tuple[Any, dict[str, Any]]:
    """Call, and return google.rpc.Status and its details by their names."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/kvhive.v1.Inference/{method}")
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(raw)
    found: dict[str, Any] = {}
    status = rpc_status.from_call(_Call(error.value))
    assert status is not None and status.code == error.value.code().value[0]
    for detail in status.details:
        message = getattr(error_details_pb2, detail.TypeName().rpartition(".")[2])()
        assert detail.Unpack(message)
        found[type(message).__name__] = message
    return status, found


class _Call:
    """An error of grpc.aio as that library, which is older than grpc.aio, asks calls."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code, self.details, self.trailing_metadata = error.code, error.details, error.trailing_metadata


async def test_an_invalid_field_is_named(address: str) -> None:
    status, details = await refused(address, "Tokenize", pb.TokenizeRequest(text="refuse bad"))
    assert (status.code, status.message) == (code_pb2.INVALID_ARGUMENT, "prompt: is too long")
    (violation,) = details["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("prompt", "is too long")
    assert (details["ErrorInfo"].reason, details["ErrorInfo"].domain) == ("INVALID_REQUEST", "kvhive")
    assert "RetryInfo" not in details


async def test_a_message_that_is_none_names_its_field_too(address: str) -> None:
    _, details = await refused(address, "Tokenize", b"\x12\x02\xff\xfe")
    (violation,) = details["BadRequest"].field_violations
    assert violation.field == "text" and "UTF-8" in violation.description


async def test_what_may_be_retried_says_why_and_when(address: str) -> None:
    status, details = await refused(address, "Tokenize", pb.TokenizeRequest(text="refuse later"))
    assert status.code == code_pb2.RESOURCE_EXHAUSTED
    assert details["ErrorInfo"].reason == "PREDICTED_TTFT"
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 7250
    status, details = await refused(address, "Prewarm", pb.PrewarmRequest(text="refuse down"))
    assert status.code == code_pb2.UNAVAILABLE
    assert details["ErrorInfo"].reason == "OTHER" and "RetryInfo" not in details


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("x" * 50_000, "y\n" * 50_000),
        ("x", "日" * 1000),
        ("x", "\n" * 5000),
        ("日" * 500, "\U0001f600" * 400),
    ],
)
async def test_an_error_far_too_long_still_arrives(
    address: str, monkeypatch: pytest.MonkeyPatch, field: str, message: str
) -> None:
    """gRPC drops trailing metadata beyond 8 KiB, and the status with it; one character may take 12 bytes."""
    monkeypatch.setitem(REFUSALS, "bad", InvalidRequest(field, message))
    status, details = await refused(address, "Tokenize", pb.TokenizeRequest(text="refuse bad"))
    assert status.code == code_pb2.INVALID_ARGUMENT
    assert MAX_DETAIL_BYTES - 4 < len(status.message.encode()) <= MAX_DETAIL_BYTES
    assert details["BadRequest"].field_violations[0].field[:50] == field[:50]


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "GetCluster"])
async def test_a_fault_of_ours_is_told_as_one_and_without_its_text(
    frontend: ScriptedFrontend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    """gRPC itself would say UNKNOWN, and what was raised. The log has it."""

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("a secret of ours")

    monkeypatch.setattr(frontend, "generate", fail)
    monkeypatch.setattr(frontend, "tokenize", fail)
    request: Any = pb.GetClusterRequest() if method == "GetCluster" else pb.TokenizeRequest(text="x")
    async with grpc_door(frontend, cluster=fail) as (_, target):
        status, details = await refused(target, method, request)
    assert (status.code, status.message) == (code_pb2.INTERNAL, "internal error")
    assert details["ErrorInfo"].reason == "INTERNAL"
    (record,) = [record for record in caplog.records if record.name.endswith("grpc_faults")]
    assert record.exc_info is not None and "a secret of ours" in str(record.exc_info[1])
    assert f"/kvhive.v1.Inference/{method}" in record.getMessage()


class _Held:
    """Something that a call is busy with."""


async def test_what_a_refused_call_had_is_let_go_at_once(
    frontend: ScriptedFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes of a request must not wait for Python to look for cycles."""
    held: list[weakref.ref[_Held]] = []

    def fail(*arguments: Any) -> Any:
        mine = _Held()
        held.append(weakref.ref(mine))
        raise InvalidRequest("field", "is bad")

    monkeypatch.setattr(frontend, "generate", fail)
    monkeypatch.setattr(frontend, "tokenize", fail)
    gc.disable()
    try:
        async with grpc_door(frontend) as (_, target), grpc.aio.insecure_channel(target) as channel:
            for call in (
                channel.unary_stream("/kvhive.v1.Inference/Generate")(b"\x12\x01x").read(),
                channel.unary_unary("/kvhive.v1.Inference/Tokenize")(b"\x12\x01x"),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match="field: is bad"):
                    await call
            for _ in range(1000):
                if all(each() is None for each in held):
                    break
                await asyncio.sleep(0.01)
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_a_client_that_went_while_it_was_refused_is_no_fault(
    frontend: ScriptedFrontend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    def fail(*arguments: Any) -> Any:
        raise grpc.aio.InternalError("Failed execute_batch")  # as gRPC says it where nobody is left to tell

    monkeypatch.setattr(frontend, "generate", fail)
    monkeypatch.setattr(frontend, "tokenize", fail)
    async with grpc_door(frontend) as (_, target), grpc.aio.insecure_channel(target) as channel:
        call = channel.unary_unary(f"/kvhive.v1.Inference/{method}")(b"\x12\x01x", timeout=1)
        assert await call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert caplog.records == []


async def test_an_id_that_nobody_remembers_is_not_found(address: str) -> None:
    status, details = await refused(address, "Explain", pb.ExplainRequest(request_id="gone"))
    assert status.code == code_pb2.NOT_FOUND and "'gone'" in status.message
    assert details["ErrorInfo"].reason == "UNKNOWN_REQUEST"
    status, _ = await refused(address, "Explain", pb.ExplainRequest(request_id="a b"))
    assert status.code == code_pb2.INVALID_ARGUMENT


async def test_token_ids_become_text_within_the_context(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=[4, 5]))).text == "4 5"
    for ids, field in (([], "token_ids"), ([1000], "token_ids[0]"), ([1] * 8193, "token_ids")):
        _, details = await refused(address, "Detokenize", pb.DetokenizeRequest(token_ids=ids))
        assert details["BadRequest"].field_violations[0].field == field


async def test_a_key_is_told_of_its_own_requests_alone(frontend: ScriptedFrontend) -> None:
    """Whose key it is says the guard; an operator's key, and a door without keys, is told of everybody's."""
    told: list[str | None] = []

    def explain(request_id: str, tenant: str | None) -> pb.ExplainResponse:
        told.append(tenant)
        return pb.ExplainResponse(decisions=[pb.RouteDecision()])

    service = InferenceService(frontend, pb.GetClusterResponse, explain=explain)
    for principal in (None, OPERATOR, Principal("alice")):
        token = asking.set(principal)
        await service.Explain(pb.ExplainRequest(request_id="r"), None)
        asking.reset(token)
    assert told == [None, None, "alice"]
