"""What clients find at the doors besides Generate: health, reflection, models, tokens, metrics."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from inference import Client, by_chat

from kvhive.proto.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_health_says_serving_and_watch_says_it_at_once(cluster: Any) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvhive.v1.Inference"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert stub.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(request, timeout=5)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()


def test_reflection_describes_the_service(cluster: Any) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "kvhive.v1.Inference" in database.get_services()
        described = database.FindFileContainingSymbol("kvhive.v1.Inference")
        methods = {method.name for service in described.service for method in service.method}
        assert methods == {
            *("Generate", "Tokenize", "Detokenize", "Prewarm"),
            *("Explain", "GetCluster", "ListModels"),
        }


async def test_tokenize_and_the_model_list_agree_with_transformers(cluster: Any, hf_tokenizer: Any) -> None:
    text = "Grüße, 世界! 12345 🦙\n\n  def f(x):"
    turns = [("system", "Be brief."), ("user", text)]
    async with Client(cluster.grpc) as client:
        plain = await client.stub.Tokenize(pb.TokenizeRequest(text=text))
        chat = await client.stub.Tokenize(pb.TokenizeRequest(chat=by_chat(*turns, max_tokens=1).chat))
        [model] = (await client.stub.ListModels(pb.ListModelsRequest())).models
    assert list(plain.token_ids) == hf_tokenizer(text)["input_ids"]
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert list(chat.token_ids) == hf_tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert (model.max_context, model.vocab_size) == (8192, 49152)


async def test_http_health_readiness_and_metrics(cluster: Any) -> None:
    async with httpx.AsyncClient(base_url=cluster.http, timeout=10) as http:
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 200
        question = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert (await http.post("/v1/chat/completions", json=question)).status_code == 200
        metrics = (await http.get("/metrics")).text
        assert "kvhive_requests_finished_total" in metrics and "kvhive_ttft_seconds_bucket" in metrics
