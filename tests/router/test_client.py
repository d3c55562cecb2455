"""kvhive.client, blocking and awaited, at a real door: typed answers and errors, retries with an end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc_door import grpc_door
from scripted_frontend import REFUSALS, USAGE, ScriptedFrontend

from kvhive.client import (
    ONCE,
    Answer,
    AsyncClient,
    Chat,
    ChatMessage,
    Client,
    ComputeError,
    InvalidRequest,
    KvhiveError,
    NotFound,
    Overloaded,
    Pin,
    Retry,
    TimedOut,
    Tool,
    ToolCall,
    ToolChoice,
    Unavailable,
)
from kvhive.client.messages import Options, PrewarmOptions, event_of
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.chat.messages import ChatPrompt
from kvhive.router.grpc_service import InferenceService
from kvhive.router.request import PromptPin
from kvhive.router.sampling_params import SamplingParams

Ask = Callable[..., Any]
HI = Chat(messages=[ChatMessage(role="user", content="say abc de")])


@pytest.fixture
async def target(frontend: ScriptedFrontend) -> AsyncIterator[str]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 16)])
    decisions = {"r1": pb.ExplainResponse(decisions=[pb.RouteDecision(worker_id="w1", reason="home")])}
    service = InferenceService(
        frontend,
        lambda: pb.GetClusterResponse(cluster="c"),
        explain=lambda i, tenant: decisions.get(i, pb.ExplainResponse()),
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture(params=["blocking", "awaited"])
async def ask(request: pytest.FixtureRequest, target: str) -> AsyncIterator[Ask]:
    """Calls a method of a client of either kind."""
    if request.param == "awaited":
        async with AsyncClient(target, retry=ONCE) as client:
            yield lambda name, *args, **fields: getattr(client, name)(*args, **fields)
        return
    with Client(target, retry=ONCE) as blocking:
        yield lambda name, *args, **fields: asyncio.to_thread(getattr(blocking, name), *args, **fields)


async def test_a_whole_answer_has_everything(ask: Ask, frontend: ScriptedFrontend) -> None:
    answer = await ask("generate", "say é b", seed=0, temperature=0.0, logit_bias={7: 1.0}, request_id="r")
    assert isinstance(answer, Answer)
    assert (answer.text, answer.choices[0].token_ids) == ("éb", [1, 2, 1, 2])
    assert (answer.request_id, answer.worker_id, answer.choices[0].reason) == ("r", "w1", "stop")
    assert answer.usage.cached_tokens == USAGE.cached_tokens
    assert frontend.requests[0].sampling == SamplingParams(seed=0, logit_bias=((7, 1.0),))


async def test_a_conversation_with_tools_goes_in_as_it_is(ask: Ask, frontend: ScriptedFrontend) -> None:
    call = ToolCall(id="c", name="f", arguments="{}")
    chat = Chat(
        messages=[
            ChatMessage(role="assistant", tool_calls=[call]),
            ChatMessage(role="tool", content="say x", tool_call_id="c"),
        ],
        tools=[Tool(name="f")],
        tool_choice=ToolChoice(mode=ToolChoice.REQUIRED),
    )
    assert (await ask("generate", chat, n=1)).text == "x"
    prompt = frontend.requests[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.tool_choice.mode == "required"
    assert prompt.messages[0].tool_calls[0].name == "f"


async def test_the_other_calls_answer(ask: Ask, frontend: ScriptedFrontend) -> None:
    assert await ask("tokenize", HI) == [3, 2]
    assert await ask("detokenize", [4, 5]) == "4 5"
    assert [model.name for model in await ask("models")] == ["demo"]
    assert (await ask("cluster")).cluster == "c"
    assert [w.worker_id for w in (await ask("prewarm", HI, workers=2)).workers] == ["w0", "w1"]
    assert [d.reason for d in await ask("explain", "r1")] == ["home"]
    await ask("generate", [1, 2, 3], pins=[Pin(tokens=2)])
    assert frontend.requests[0].pins == (PromptPin(300.0, 2),)


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [("bad", InvalidRequest), ("late", TimedOut), ("down", Unavailable), ("broken", ComputeError)],
)
async def test_errors_are_typed(ask: Ask, refusal: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        await ask("generate", f"refuse {refusal}")


async def test_a_fault_of_the_routers_is_no_fault_of_the_models(frontend: ScriptedFrontend) -> None:
    async with grpc_door(frontend) as (_, target), AsyncClient(target, retry=ONCE) as client:
        with pytest.raises(KvhiveError, match="internal: internal error") as error:
            await client.generate("bug")
    assert not isinstance(error.value, ComputeError)


async def test_errors_say_which_field_or_when(ask: Ask) -> None:
    with pytest.raises(InvalidRequest, match="is 17") as invalid:
        await ask("generate", "say a", n=17)
    assert invalid.value.field == "n"
    with pytest.raises(Overloaded) as later:
        await ask("generate", "refuse later")
    assert (later.value.retry_after_s, later.value.cause) == (7.25, "predicted_ttft")
    with pytest.raises(NotFound):
        await ask("explain", "nobody")
    with pytest.raises(InvalidRequest, match="larger than max"):
        await ask("generate", "x" * (1 << 17))
    with pytest.raises(TimedOut):
        await ask("generate", "hang a", timeout_s=0.2)


async def test_a_value_that_has_no_encoding_never_leaves(ask: Ask) -> None:
    for fields, field in (({"seed": -1}, "seed"), ({"n": 2**40}, "n"), ({"sed": 1}, "sed")):
        with pytest.raises(InvalidRequest) as error:
            await ask("generate", "say a", **fields)
        assert error.value.field == field
    with pytest.raises(InvalidRequest, match="token_ids"):
        await ask("generate", [1, -1])


class Refusing:
    """Refuses the first calls, then says yes."""

    def __init__(self, frontend: ScriptedFrontend, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.calls, generate = 0, frontend.generate

        def counted(request: Any) -> Any:
            self.calls += 1
            return refused() if self.calls <= times else generate(request)

        async def refused() -> Any:
            raise REFUSALS["soon"]
            yield

        monkeypatch.setattr(frontend, "generate", counted)


@pytest.mark.parametrize("blocking", [True, False])
async def test_what_is_refused_is_sent_again_when_the_server_says(
    frontend: ScriptedFrontend, target: str, monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    refusing, began = Refusing(frontend, monkeypatch, 2), time.monotonic()
    if blocking:
        with Client(target) as client:
            answer = await asyncio.to_thread(client.generate, "say a")
    else:
        async with AsyncClient(target) as waiting:
            answer = await waiting.generate("say a")
    assert (answer.text, refusing.calls) == ("a", 3)
    assert time.monotonic() - began >= 2 * 0.125


async def test_retries_end(frontend: ScriptedFrontend, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Refusing(frontend, monkeypatch, 100)
    async with AsyncClient(target, retry=Retry(attempts=3)) as client:
        with pytest.raises(Overloaded):
            await client.generate("say a")
        assert refusing.calls == 3
        with pytest.raises(Overloaded):  # the caller's time would be over before
            await client.generate("say a", timeout_s=0.1)
        assert refusing.calls == 4


async def test_a_stream_that_has_begun_is_not_sent_again(target: str, frontend: ScriptedFrontend) -> None:
    async with AsyncClient(target) as client:
        seen = []
        with pytest.raises(Unavailable, match="the worker was lost"):
            async for event in client.stream("break a"):
                seen.append(type(event).__name__)
    assert (seen, len(frontend.requests)) == (["Started", "Delta", "Delta"], 1)


async def test_closing_a_stream_cancels_it(target: str, frontend: ScriptedFrontend) -> None:
    async with AsyncClient(target) as client:
        stream = client.stream("hang a")
        await anext(stream)
        await stream.aclose()
        await frontend.until_idle()
    with Client(target) as blocking:
        events = blocking.stream("hang a")
        await asyncio.to_thread(next, events)
        await asyncio.to_thread(events.close)  # type: ignore[attr-defined]
        await frontend.until_idle()


async def test_the_key_is_shown() -> None:
    seen: list[dict[str, Any]] = []

    class Door(inference_pb2_grpc.InferenceServicer):
        async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
            seen.append(dict(context.invocation_metadata()))
            return pb.ListModelsResponse()

    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Door(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with AsyncClient(address, api_key="k1") as client, AsyncClient(address) as nobody:
        await client.models()
        await nobody.models()
    await server.stop(0)
    assert [metadata.get("authorization") for metadata in seen] == ["Bearer k1", None]


def test_waits_are_bounded_and_only_for_what_may_go_well() -> None:
    retry = Retry(attempts=3, longest_wait_s=5.0)
    assert retry.wait_s(Overloaded(retry_after_s=2.0), 1, 0.9) == 2.0
    assert retry.wait_s(Overloaded(retry_after_s=5.1), 1, 0.0) is None
    assert [retry.wait_s(Unavailable(), n, 0.0) for n in (1, 2, 3)] == [0.5, 1.0, None]
    assert retry.wait_s(Unavailable(), 1, 1.0) == 0.75
    for error in (InvalidRequest("f", "x"), TimedOut(), ComputeError()):
        assert retry.wait_s(error, 1, 0.0) is None


def test_the_options_are_the_fields_of_the_proto() -> None:
    sampling = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    generate = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    prewarm = {field.name for field in pb.PrewarmRequest.DESCRIPTOR.fields}
    inputs = {"text", "token_ids", "chat"}
    assert set(Options.__annotations__) == sampling | generate - inputs - {"sampling"}
    assert set(PrewarmOptions.__annotations__) == prewarm - inputs


def test_tool_calls_and_choices_are_put_together() -> None:
    answer = Answer()
    for event in (
        pb.Started(request_id="r", worker_id="w", prompt_tokens=3),
        pb.Delta(choice=1, text="a", token_ids=[1]),
        pb.Delta(choice=1, tool_calls=[pb.ToolCallDelta(index=1, id="c2", name="g", arguments="{")]),
        pb.Delta(choice=1, tool_calls=[pb.ToolCallDelta(index=1, arguments="}")]),
        pb.Finished(choice=1, reason=pb.FINISH_REASON_TOOL_CALLS),
        pb.Finished(choice=0, reason=pb.FINISH_REASON_STOP, stop="x", usage=pb.Usage(completion_tokens=1)),
    ):
        answer.take(event)
    first, second = answer.choices
    assert (first.reason, first.stop, second.reason, answer.prompt_tokens) == ("stop", "x", "tool_calls", 3)
    assert second.tool_calls[1] == ToolCall(id="c2", name="g", arguments="{}")
    assert second.message == ChatMessage(role="assistant", content="a", tool_calls=second.tool_calls)
    assert answer.usage.completion_tokens == 1
    assert event_of(pb.GenerateResponse()) is None
