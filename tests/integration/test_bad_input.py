"""Bad input is refused by name, on both doors, and nobody else notices."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import openai
import pytest
from inference import Client, by_tokens

from kvhive.proto.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(**fields))


BAD = [
    (pb.GenerateRequest(), "input: one of text, token_ids and chat must be set, none is"),
    (pb.GenerateRequest(text=""), "text: must not be empty"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids: must not be empty"),
    (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 49152])),
        "token_ids[1]: must be between 0 and 49151, is 49152",
    ),
    (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 8192)),
        "token_ids: must have at most 8191 tokens, to leave room for output in the model's context of 8192; "
        "has 8192",
    ),
    (pb.GenerateRequest(chat=pb.Chat()), "messages: must not be empty"),
    (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="robot", content="x")])),
        "messages[0].role: must be one of system, user, assistant, tool, is 'robot'",
    ),
    (pb.GenerateRequest(text="hi", model="gpt"), "model: must be 'SmolLM2-135M-Instruct.Q4_1', is 'gpt'"),
    (sampling(max_tokens=0), "max_tokens: must be between 1 and 8192, is 0"),
    (sampling(max_tokens=-5), "max_tokens: must be between 1 and 8192, is -5"),
    (sampling(max_tokens=10**9), "max_tokens: must be between 1 and 8192, is 1000000000"),
    (
        sampling(max_tokens=8192),
        "max_tokens: must be between 1 and 8191 (the model's context of 8192 less the prompt's 1), is 8192",
    ),
    (sampling(temperature=-0.5), "temperature: must be between 0 and 100, is -0.5"),
    (sampling(temperature=float("nan")), "temperature: must be between 0 and 100, is nan"),
    (sampling(top_p=0.0), "top_p: must be above 0 and at most 1, is 0"),
    (sampling(top_p=float("inf")), "top_p: must be between 0 and 1, is inf"),
    (sampling(top_k=-1), "top_k: must be between 0 and 2147483647, is -1"),
    (sampling(min_p=1.5), "min_p: must be between 0 and 1, is 1.5"),
    (sampling(stop=[""]), "stop[0]: must be 1 to 256 characters, is empty"),
    (sampling(stop=["x"] * 17), "stop: must be at most 16 strings, is 17"),
    (sampling(stop_token_ids=[60000]), "stop_token_ids[0]: must be between 0 and 49151, is 60000"),
    (
        pb.GenerateRequest(text="hi", cache_salt="s" * 257),
        "cache_salt: must be at most 256 characters, is 257",
    ),
    (
        pb.GenerateRequest(text="hi", request_id="a b"),
        "request_id: must be at most 128 printable ASCII characters without spaces, is 'a b'",
    ),
]


async def test_grpc_names_field_limit_and_value(cluster: Any) -> None:
    async with Client(cluster.grpc) as client:
        for request, message in BAD:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.generate(request)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, error.value.details()
            assert error.value.details() == message
        assert len((await client.generate(by_tokens([1, 2, 3], 3))).token_ids) == 3
        await client.until(lambda c: all(w.blocks.live == 0 for w in c.workers), 3.0, "idle")


async def test_bytes_that_are_no_utf8_are_refused_and_the_channel_stays_usable(cluster: Any) -> None:
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        generate = channel.unary_stream("/kvhive.v1.Inference/Generate")
        for raw in (
            b"\x12\x02\xff\xfe",
            b"\x12\xff",
            b"\xff" * 64,
        ):  # field 2 (text), not UTF-8; cut short; noise
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in generate(raw):
                    pass
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, error.value.details()
    async with Client(cluster.grpc) as client:
        assert len((await client.generate(by_tokens([1, 2, 3], 3))).token_ids) == 3


async def test_http_answers_400_in_openai_s_words(cluster: Any) -> None:
    url = f"{cluster.http}/v1/chat/completions"
    hello = [{"role": "user", "content": "hi"}]
    bad: list[tuple[Any, str]] = [
        (b"{", "body"),
        (b'{"messages": "\xff"}', "body"),
        ({"messages": []}, "messages"),
        ({"messages": hello, "max_tokens": "5"}, "max_tokens"),
        ({"messages": hello, "max_tokens": 0}, "max_tokens"),
        ({"messages": hello, "max_tokens": 10**30}, "max_tokens"),
        ({"messages": hello, "temperature": -1}, "temperature"),
        ({"messages": hello, "n": 17}, "n"),
        ({"messages": hello, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": hello, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": hello, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": hello, "tools": [{"type": "custom"}]}, "tools[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
    ]
    async with httpx.AsyncClient(timeout=30) as http:
        for body, param in bad:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            response = await http.post(url, **content)
            assert response.status_code == 400, (body, response.text)
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param, (body, error)
        unknown = await http.post(url, json={"messages": hello, "model": "gpt"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


async def test_the_official_openai_client_works(cluster: Any) -> None:
    """Plain, streamed with usage, cached tokens, cache_salt, prompt_cache_key, and models."""
    client = openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0)
    system = {"role": "system", "content": "You are a careful librarian. " * 20}
    messages: Any = [system, {"role": "user", "content": "Say hello."}]
    async with client:
        model = (await client.models.list()).data[0].id
        options: Any = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
        options["extra_body"] = {"cache_salt": "openai-test"}
        plain = await client.chat.completions.create(**options)
        assert plain.usage is not None and plain.usage.prompt_tokens_details is not None
        text, usage = "", None
        async for chunk in await client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}, prompt_cache_key="k"
        ):
            usage = chunk.usage or usage
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        assert text == plain.choices[0].message.content
        assert usage is not None and usage.prompt_tokens_details is not None
        expected = (plain.usage.prompt_tokens - 1) // 16 * 16
        assert usage.prompt_tokens_details.cached_tokens == expected > 0
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.chat.completions.create(model=model, messages=messages, max_tokens=-1)
