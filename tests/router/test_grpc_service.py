"""The gRPC door over a real connection: what arrives behind it, and what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from scripted_frontend import USAGE, ScriptedFrontend

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.proto.v1 import inference_pb2_grpc
from kvhive.router.chat.messages import ChatMessage, ChatPrompt
from kvhive.router.grpc_service import REQUEST_TYPES, InferenceService
from kvhive.router.request import SamplingParams, TextPrompt, TokenPrompt

CLUSTER = pb.GetClusterResponse(cluster="c", workers=[pb.WorkerInfo(id="w1")])


@pytest.fixture
async def stub(frontend: ScriptedFrontend) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(frontend, lambda: CLUSTER), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)
    await server.stop(0)


async def generate(
    stub: inference_pb2_grpc.InferenceStub, text: str = "say a", **sampling: object
) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**sampling))  # type: ignore[arg-type]
    return [response async for response in stub.Generate(request)]


async def test_a_stream_is_started_deltas_and_finished(stub: inference_pb2_grpc.InferenceStub) -> None:
    started, *deltas, finished = await generate(stub, "say é b")
    assert started.started == pb.Started(request_id="made-up", worker_id="w1", prompt_tokens=5)
    assert [(d.delta.text, list(d.delta.token_ids)) for d in deltas] == [
        ("é", [1]),
        ("", [2]),
        ("b", [1]),
        ("", [2]),
    ]
    assert finished.finished.reason == pb.FINISH_REASON_STOP
    usage = finished.finished.usage
    assert {field.name for field in usage.DESCRIPTOR.fields} == set(USAGE.__slots__)
    assert [(k.tokens, k.ttl_s, k.kept) for k in usage.kept] == [
        (k.tokens, k.ttl_s, k.kept) for k in USAGE.kept
    ]
    for name in set(USAGE.__slots__) - {"kept"}:
        assert getattr(usage, name) == getattr(USAGE, name), name


@pytest.mark.parametrize(
    "unset", [pb.GenerateRequest(text="say"), pb.GenerateRequest(text="say", sampling={})]
)
async def test_unset_fields_take_the_documented_defaults(
    frontend: ScriptedFrontend, stub: inference_pb2_grpc.InferenceStub, unset: pb.GenerateRequest
) -> None:
    assert [response async for response in stub.Generate(unset)]
    (request,) = frontend.requests
    assert request.sampling == SamplingParams(
        max_tokens=None, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, ignore_eos=False
    )
    assert (request.model, request.cache_salt, request.cache_key, request.request_id) == ("", "", "", "")


async def test_zero_is_not_unset(frontend: ScriptedFrontend, stub: inference_pb2_grpc.InferenceStub) -> None:
    """A seed of 0 is a seed; max_tokens and top_p of 0 are errors and not their defaults."""
    await generate(stub, seed=0, temperature=0.0, top_k=0, min_p=0.0, ignore_eos=False)
    assert frontend.requests[0].sampling == SamplingParams(seed=0)
    for field in ("max_tokens", "top_p"):
        with pytest.raises(grpc.aio.AioRpcError, match=field) as error:
            await generate(stub, **{field: 0})
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(frontend.requests) == 1


async def test_every_given_field_arrives(
    frontend: ScriptedFrontend, stub: inference_pb2_grpc.InferenceStub
) -> None:
    sampling = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": 2**64 - 1,
        "stop": ("x", "é"),
        "stop_token_ids": (4, 5),
        "ignore_eos": True,
        "typical_p": 0.5,
        "repetition_penalty": 1.5,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.25,
        "logit_bias": {9: 2.0},
        "min_tokens": 2,
        "logprobs": 0,
        "prompt_logprobs": 3,
        "speculate": False,
    }
    assert set(sampling) == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    names = {"model": "m", "cache_salt": "s", "cache_key": "k", "request_id": "r"}
    request = pb.GenerateRequest(text="say", sampling=pb.SamplingParams(**sampling), **names)  # type: ignore[arg-type]
    responses = [response async for response in stub.Generate(request)]
    assert responses[0].started.request_id == "r"
    got = frontend.requests[0]
    assert got.sampling == SamplingParams(**sampling | {"logit_bias": ((9, 2.0),)})  # type: ignore[arg-type]
    assert {name: getattr(got, name) for name in names} == names


@pytest.mark.parametrize(
    ("wire", "prompt"),
    [
        (pb.GenerateRequest(text="say hé"), TextPrompt("say hé")),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0, 999])), TokenPrompt((0, 999))),
        (
            pb.GenerateRequest(
                chat=pb.Chat(
                    messages=[
                        pb.ChatMessage(role="system", content=""),
                        pb.ChatMessage(role="user", content="say"),
                    ]
                )
            ),
            ChatPrompt((ChatMessage("system", ""), ChatMessage("user", "say"))),
        ),
    ],
)
async def test_each_kind_of_input_arrives_as_itself(
    frontend: ScriptedFrontend,
    stub: inference_pb2_grpc.InferenceStub,
    wire: pb.GenerateRequest,
    prompt: object,
) -> None:
    assert [response async for response in stub.Generate(wire)]
    assert frontend.requests[0].prompt == prompt


async def test_no_input_at_all_is_refused(stub: inference_pb2_grpc.InferenceStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        [response async for response in stub.Generate(pb.GenerateRequest(model="demo"))]
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details() == "input: one of text, token_ids and chat must be set, none is"


@pytest.mark.parametrize(
    ("refusal", "code", "details"),
    [
        ("bad", grpc.StatusCode.INVALID_ARGUMENT, "prompt: is too long"),
        ("busy", grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
        ("late", grpc.StatusCode.DEADLINE_EXCEEDED, "no first token within 1 s"),
        ("down", grpc.StatusCode.UNAVAILABLE, "none"),
        ("broken", grpc.StatusCode.INTERNAL, "non-finite logits"),
    ],
)
async def test_each_error_has_its_status(
    stub: inference_pb2_grpc.InferenceStub, refusal: str, code: grpc.StatusCode, details: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate(stub, f"refuse {refusal}")
    assert (error.value.code(), error.value.details()) == (code, details)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Tokenize(pb.TokenizeRequest(text=f"refuse {refusal}"))
    assert (error.value.code(), error.value.details()) == (code, details)


async def test_an_error_in_a_stream_comes_after_what_was_generated(
    stub: inference_pb2_grpc.InferenceStub,
) -> None:
    seen = []
    with pytest.raises(grpc.aio.AioRpcError, match="the worker was lost") as error:
        async for response in stub.Generate(pb.GenerateRequest(text="break a")):
            seen.append(response.WhichOneof("event"))
    assert seen == ["started", "delta", "delta"]
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_client_that_leaves_cancels_its_generation(
    frontend: ScriptedFrontend, stub: inference_pb2_grpc.InferenceStub
) -> None:
    call = stub.Generate(pb.GenerateRequest(text="hang a"))
    assert (await call.read()).started.worker_id == "w1"
    call.cancel()
    await frontend.until_idle()


async def test_the_other_calls_answer(stub: inference_pb2_grpc.InferenceStub) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="say abc de")])
    assert (await stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids == [3, 2]
    assert await stub.GetCluster(pb.GetClusterRequest()) == CLUSTER
    models = (await stub.ListModels(pb.ListModelsRequest())).models
    assert list(models) == [pb.Model(name="demo", max_context=8192, vocab_size=1000, identity="ab12")]


def test_every_rpc_is_implemented_and_has_its_request_type() -> None:
    methods = pb.DESCRIPTOR.services_by_name["Inference"].methods
    for method in methods:
        assert method.name in vars(InferenceService)
        assert REQUEST_TYPES[f"/kvhive.v1.Inference/{method.name}"].DESCRIPTOR is method.input_type


async def test_prewarming_says_what_it_took_at_each_worker(stub: inference_pb2_grpc.InferenceStub) -> None:
    answer = await stub.Prewarm(pb.PrewarmRequest(text="say", workers=2))
    assert (answer.prompt_tokens, [worker.worker_id for worker in answer.workers]) == (7, ["w0", "w1"])
    assert answer.workers[0] == pb.Prewarmed(
        worker_id="w0", cached_tokens=1, pulled_tokens=3, written_tokens=2
    )
    assert len((await stub.Prewarm(pb.PrewarmRequest(text="say"))).workers) == 1
    for ttl_s, said in ((60.0, (True, "")), (600.0, (False, "over_budget"))):
        (kept,) = (await stub.Prewarm(pb.PrewarmRequest(text="say", ttl_s=ttl_s))).workers
        assert (kept.kept, kept.not_kept) == said
    for request, code in (
        (pb.PrewarmRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.PrewarmRequest(text="say", ttl_s=0), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.PrewarmRequest(text="refuse down"), grpc.StatusCode.UNAVAILABLE),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Prewarm(request)
        assert error.value.code() is code
