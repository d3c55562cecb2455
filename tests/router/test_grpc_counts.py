"""Crowds in a message of gRPC are refused before an object of ours is made of each, in the usual words."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_door import grpc_door
from scripted_frontend import ScriptedFrontend

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.limits import MAX_LOGIT_BIAS_ENTRIES, MAX_PINS
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router import grpc_service
from kvhive.router.chat.messages import MAX_ALL_TOOL_CALLS, MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS
from kvhive.router.grpc_counts import check_counts
from kvhive.router.grpc_requests import generate_request
from kvhive.router.request import validate_request
from kvhive.router.sampling_params import MAX_STOP_TOKEN_IDS, MAX_STOPS

CONTEXT, VOCABULARY = 8192, 1000
USER = pb.ChatMessage(role="user", content="hi")


def calling(calls: int) -> pb.ChatMessage:
    return pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()] * calls)


def crowds(more: int) -> dict[str, pb.GenerateRequest]:
    """What is as many as may be, and so many more."""
    callers = [calling(MAX_TOOL_CALLS)] * (MAX_ALL_TOOL_CALLS // MAX_TOOL_CALLS)
    tools = [pb.Tool(name=f"t{i}") for i in range(MAX_TOOLS + more)]
    bias = dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES + more), 1.0)
    stops = pb.SamplingParams(stop=["x"] * (MAX_STOPS + more))
    stop_ids = pb.SamplingParams(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + more))
    return {
        "messages": pb.GenerateRequest(chat=pb.Chat(messages=[USER] * (MAX_MESSAGES + more))),
        "tools": pb.GenerateRequest(chat=pb.Chat(messages=[USER], tools=tools)),
        "calls": pb.GenerateRequest(chat=pb.Chat(messages=[calling(MAX_TOOL_CALLS + more)])),
        "all calls": pb.GenerateRequest(chat=pb.Chat(messages=callers + [calling(1)] * more)),
        "token ids": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * (CONTEXT - 1 + more))),
        "pins": pb.GenerateRequest(text="x", pins=[pb.Pin()] * (MAX_PINS + more)),
        "bias": pb.GenerateRequest(text="x", sampling=pb.SamplingParams(logit_bias=bias)),
        "stops": pb.GenerateRequest(text="x", sampling=stops),
        "stop ids": pb.GenerateRequest(text="x", sampling=stop_ids),
    }


@pytest.mark.parametrize("name", crowds(0))
def test_one_too_many_is_refused_at_once_in_the_words_of_the_later_check(name: str) -> None:
    check_counts(crowds(0)[name], CONTEXT)
    wire = crowds(1)[name]
    with pytest.raises(InvalidRequest) as early:
        check_counts(wire, CONTEXT)
    with pytest.raises(InvalidRequest) as late:
        validate_request(generate_request(wire, None), 2 * MAX_LOGIT_BIAS_ENTRIES, CONTEXT)
    assert str(early.value) == str(late.value)


async def test_no_door_makes_anything_of_a_crowd(
    frontend: ScriptedFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*arguments: Any) -> None:
        raise AssertionError("something was made of it")

    for translation in ("generate_request", "prewarm_request", "prompt", "check_token_ids"):
        monkeypatch.setattr(grpc_service, translation, made)
    crowd = pb.Chat(messages=[USER] * (MAX_MESSAGES + 1))
    async with grpc_door(frontend) as (_, target), grpc.aio.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for call in (
            stub.Generate(pb.GenerateRequest(chat=crowd)).read(),
            stub.Tokenize(pb.TokenizeRequest(chat=crowd)),
            stub.Prewarm(pb.PrewarmRequest(chat=crowd)),
            stub.Prewarm(pb.PrewarmRequest(token_ids=pb.TokenIds(ids=[1] * CONTEXT))),
            stub.Detokenize(pb.DetokenizeRequest(token_ids=[VOCABULARY] * (CONTEXT + 1))),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="must") as error:
                await call
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
