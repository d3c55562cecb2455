"""What repeats in a message of gRPC is counted in its bytes, exactly as the parser would find it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.internal.encoder import _VarintBytes as number
from google.protobuf.message import DecodeError, Message
from grpc_door import grpc_door
from scripted_frontend import ScriptedFrontend

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.limits import MAX_LOGIT_BIAS_ENTRIES, MAX_PINS
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.chat.messages import MAX_ALL_TOOL_CALLS, MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS
from kvhive.router.grpc_service import REQUEST_TYPES
from kvhive.router.grpc_wire_counts import (
    FIELDS_AT_A_TIME,
    MAX_FIELDS,
    NoMessage,
    WireCounts,
    wire_limits,
)
from kvhive.router.malformed_message import COUNTED_BYTES
from kvhive.router.sampling_params import MAX_STOP_TOKEN_IDS, MAX_STOPS
from kvhive.scripts.fuzz_messages import random_call

CONTEXT = 100_000
LIMITS = wire_limits(CONTEXT)
GENERATE = WireCounts(pb.GenerateRequest, LIMITS)
MESSAGE = pb.ChatMessage(role="user", content="hi")


def counted(raw: bytes, counts: WireCounts = GENERATE) -> int:
    """Walk to the end; how often it paused."""
    return sum(1 for _ in counts.walk(raw))


def delimited(field: int, content: bytes) -> bytes:
    return number(field << 3 | 2) + number(len(content)) + content


def calls(count: int) -> list[pb.ChatMessage]:
    calling = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="1")] * MAX_TOOL_CALLS)
    rest = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="1")] * (count % MAX_TOOL_CALLS))
    return [calling] * (count // MAX_TOOL_CALLS) + [rest]


def sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**fields))


CROWDS = {
    "chat.messages": (lambda n: pb.GenerateRequest(chat=pb.Chat(messages=[MESSAGE] * n)), MAX_MESSAGES),
    "chat.tools": (lambda n: pb.GenerateRequest(chat=pb.Chat(tools=[pb.Tool(name="t")] * n)), MAX_TOOLS),
    "chat.messages.tool_calls": (
        lambda n: pb.GenerateRequest(chat=pb.Chat(messages=calls(n))),
        MAX_ALL_TOOL_CALLS,
    ),
    "pins": (lambda n: pb.GenerateRequest(pins=[pb.Pin()] * n), MAX_PINS),
    "sampling.stop": (lambda n: sampling(stop=["x"] * n), MAX_STOPS),
    "sampling.stop_token_ids": (lambda n: sampling(stop_token_ids=[300] * n), MAX_STOP_TOKEN_IDS),
    "sampling.logit_bias": (
        lambda n: sampling(logit_bias=dict.fromkeys(range(n), 1.0)),
        MAX_LOGIT_BIAS_ENTRIES,
    ),
    "token_ids.ids": (
        lambda n: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2**32 - 1] * (n // 2) + [300] * (n % 2))),
        CONTEXT - 1,
    ),
}


@pytest.mark.parametrize("field", CROWDS)
def test_as_many_as_may_be_pass_and_one_more_does_not(field: str) -> None:
    make, most = CROWDS[field]
    counted(make(most).SerializeToString())
    with pytest.raises(InvalidRequest) as error:
        counted(make(most + 1).SerializeToString())
    assert str(error.value) == f"{field}: must be at most {most}, is at least {most + 1}"


def test_every_field_that_repeats_in_a_request_has_a_limit() -> None:
    for request in REQUEST_TYPES.values():
        counted(b"", WireCounts(request, LIMITS))
    with pytest.raises(KeyError):
        WireCounts(pb.GenerateResponse, LIMITS)


def test_a_request_that_has_all_that_it_may_is_not_too_much() -> None:
    make = {name: make for name, (make, _) in CROWDS.items()}
    full = [make[name](CROWDS[name][1]) for name in CROWDS if name.startswith(("pins", "sampling"))]
    request = pb.GenerateRequest()
    for part in full:
        request.MergeFrom(part)
    busy = pb.ChatMessage(role="a", content="b", tool_call_id="c", cache_control=pb.CacheControl(ttl_s=1))
    call = pb.ToolCall(id="a", name="b", arguments="c")
    request.chat.messages.extend([busy] * MAX_MESSAGES)
    for message in request.chat.messages:
        message.tool_calls.extend([call] * (MAX_ALL_TOOL_CALLS // MAX_MESSAGES))
    tool = pb.Tool(name="a", description="b", parameters="c", cache_control=pb.CacheControl(ttl_s=1))
    request.chat.tools.extend([tool] * MAX_TOOLS)
    counted(request.SerializeToString())


def test_what_is_spread_over_the_message_is_counted_together() -> None:
    """A field that comes again is merged with what was there, and a list may come in pieces or one by one."""
    some = pb.GenerateRequest(chat=pb.Chat(messages=[MESSAGE] * 1000)).SerializeToString()
    counted(some * 4)
    with pytest.raises(InvalidRequest, match=r"chat\.messages: must be at most 4096"):
        counted(some * 5)
    packed, single = delimited(8, b"\x01" * 30), b"\x40\x01" * 5
    counted(delimited(5, packed + single * 5) + delimited(5, single))
    with pytest.raises(InvalidRequest, match=r"stop_token_ids: must be at most 64, is at least 65"):
        counted(delimited(5, packed) + delimited(5, single + packed))


@pytest.mark.parametrize(
    "piece",
    [b"\x2a\x00", b"\xf8\x7f\x01", b"\x12\x00", b"\x7d1234", b"\x79" + b"8" * 8, b"\x1a\x02\x0a\x00"],
    ids=["message", "unknown", "text", "fixed32", "fixed64", "empty list"],
)
def test_millions_of_fields_of_any_kind_are_too_much(piece: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"^request: must be at most {MAX_FIELDS} fields, is at least"):
        counted(piece * (MAX_FIELDS + FIELDS_AT_A_TIME))
    assert counted(piece * 4 * FIELDS_AT_A_TIME) >= 4, "others have their turn meanwhile"


def test_a_large_text_is_passed_over() -> None:
    assert counted(pb.GenerateRequest(text="x" * 2**23).SerializeToString()) == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"\x2a",
        b"\x2a\x05\x01",
        b"\x80",
        b"\x12\xff\xff\xff\xff\x7f",
        b"\x08" + b"\xff" * 11,
        b"\x0b\x0c",
        b"\x0e",
    ],
)
def test_what_is_no_message_is_none(raw: bytes) -> None:
    with pytest.raises(NoMessage):
        counted(raw)


def found(message: Message, counts: Counter[str]) -> Counter[str]:
    """Count what repeats in a parsed message."""
    for known, value in message.ListFields():
        if known.is_repeated:
            counts[known.full_name] += len(value)
        is_map = known.message_type is not None and known.message_type.GetOptions().map_entry
        if known.type == FieldDescriptor.TYPE_MESSAGE and not is_map:
            for inner in value if known.is_repeated else [value]:
                found(inner, counts)
    return counts


def excess(raw: bytes, request: type[Message], limits: dict[str, int]) -> bool:
    try:
        counted(raw, WireCounts(request, dict.fromkeys(LIMITS, 10**9) | limits))
    except InvalidRequest:
        return True
    return False


def test_the_counts_are_those_of_the_parser() -> None:
    """Of odd messages, and of what is left of them when they are cut and bent."""
    chance = random.Random(7)
    parsed = 0
    for _ in range(200):
        request = chance.choice(list(REQUEST_TYPES.values()))
        raw = random_call(request.DESCRIPTOR, chance)
        if len(raw) > 4096:
            continue
        try:
            counts = found(request.FromString(raw), Counter())
        except DecodeError:
            continue
        parsed += 1
        for name, count in counts.items():
            if not name.endswith("logit_bias"):  # where a key may come twice
                assert not excess(raw, request, {name: count})
            assert excess(raw, request, {name: count - 1})
    assert parsed > 100


async def test_the_door_refuses_a_crowd_that_it_has_not_parsed(
    frontend: ScriptedFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 MB; and takes what is large otherwise."""
    crowd = b"\x5a\x00" * 2**20
    assert len(crowd) > COUNTED_BYTES
    async with grpc_door(frontend) as (_, target), grpc.aio.insecure_channel(target) as channel:
        for call in (
            channel.unary_stream("/kvhive.v1.Inference/Generate")(crowd).read(),
            channel.unary_unary("/kvhive.v1.Inference/Tokenize")(b"\x1a\x00" * 2**20),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="must be at most") as error:
                await call
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stub = inference_pb2_grpc.InferenceStub(channel)
        large = pb.GenerateRequest(text="say a" + " " * 2 * COUNTED_BYTES)
        assert [r async for r in stub.Generate(large)][-1].HasField("finished")
    assert len(frontend.requests) == 1
