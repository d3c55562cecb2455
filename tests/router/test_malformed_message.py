"""Bytes that are not the message they should be are refused by name, over a real connection."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.grpc_wire_counts import wire_limits
from kvhive.router.malformed_message import MalformedMessageGuard, explain

REQUESTS = {
    "/kvhive.v1.Inference/Generate": pb.GenerateRequest,
    "/kvhive.v1.Inference/Tokenize": pb.TokenizeRequest,
}


def with_bad_text(message: pb.GenerateRequest, good: bytes, bad: bytes) -> bytes:
    raw = message.SerializeToString()
    assert raw.count(good) == 1 and len(good) == len(bad)
    return raw.replace(good, bad)


CHAT = pb.GenerateRequest(
    chat=pb.Chat(
        messages=[pb.ChatMessage(role="user", content="fine"), pb.ChatMessage(role="user", content="XX")]
    )
)
CASES = [
    (
        with_bad_text(pb.GenerateRequest(text="XX"), b"XX", b"\xff\xfe"),
        r"text: must be valid UTF-8, is b'\xff\xfe'",
    ),
    (with_bad_text(CHAT, b"XX", b"\xc3\x28"), r"chat.messages[1].content: must be valid UTF-8, is b'\xc3('"),
    (
        with_bad_text(pb.GenerateRequest(sampling=pb.SamplingParams(stop=["ok", "XX"])), b"XX", b"\x80\x80"),
        r"sampling.stop[1]: must be valid UTF-8, is b'\x80\x80'",
    ),
    (b"\x12\xff", "request: 2 bytes that are not a kvhive.v1.GenerateRequest"),
    (b"\xff" * 64, "request: 64 bytes that are not a kvhive.v1.GenerateRequest"),
]


@pytest.mark.parametrize(("raw", "message"), CASES)
def test_what_is_wrong_is_named(raw: bytes, message: str) -> None:
    assert explain(raw, pb.GenerateRequest) == message


def test_a_large_message_is_refused_without_a_search() -> None:
    """Half a million empty fields would hold up the event loop for seconds."""
    raw = b"\x0a\x00" * 500_000 + b"\x12\x01\xff"
    started = time.monotonic()
    assert (
        explain(raw, pb.GenerateRequest)
        == "request: 1000003 bytes that are not a valid kvhive.v1.GenerateRequest"
    )
    assert time.monotonic() - started < 0.5


class Echo(inference_pb2_grpc.InferenceServicer):
    """Answers with what it was asked."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:
        yield pb.GenerateResponse(delta=pb.Delta(text=request.text))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=[len(request.text)])


async def test_the_channel_stays_usable_and_good_messages_pass() -> None:
    server = grpc.aio.server(interceptors=[MalformedMessageGuard(REQUESTS, wire_limits(100))])
    inference_pb2_grpc.add_InferenceServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stream = channel.unary_stream("/kvhive.v1.Inference/Generate")
            single = channel.unary_unary("/kvhive.v1.Inference/Tokenize")
            for raw, message in CASES:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    async for _ in stream(raw):
                        pass
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert error.value.details() == message
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await single(b"\x12\xff")
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert [r.delta.text async for r in stub.Generate(pb.GenerateRequest(text="hé"))] == ["hé"]
            assert (await stub.Tokenize(pb.TokenizeRequest(text="abc"))).token_ids == [3]
    finally:
        await server.stop(0)
