"""POST /v1/completions: prompts of every form, and answers that the official client and gRPC agree with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_door import events
from open_doors import OpenDoors, open_doors
from openai.types import Completion
from scripted_frontend import ScriptedFrontend

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.openai.fields import CompletionRequest
from kvhive.router.openai.text_request import MAX_PROMPTS, parse_text_completion
from kvhive.router.openai.text_response import TextOffsets
from kvhive.router.request import TextPrompt, TokenPrompt
from kvhive.router.sampling_params import SamplingParams
from kvhive.scripts.embedded_redis import EmbeddedRedis


def parse(prompt: object = "hi", **fields: Any) -> CompletionRequest:
    return parse_text_completion({"prompt": prompt, **fields}, "id-1")


async def post(http: httpx.AsyncClient, prompt: object, **fields: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"model": "demo", "prompt": prompt, **fields})


def test_absent_fields_take_openais_defaults() -> None:
    asked = parse()
    assert asked.request.sampling == SamplingParams(max_tokens=16, temperature=1.0)
    assert asked.requests[0].prompt == TextPrompt("hi")
    assert (asked.stream, asked.include_usage, asked.echo, asked.request.n) == (False, False, False, 1)
    names = ["echo", "suffix", "logprobs", "max_tokens", "n", "stream", "best_of", "user"]
    assert parse(**dict.fromkeys(names)).requests == asked.requests


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", [TextPrompt("a")]),
        (["a"], [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1, 2], [3]], [TokenPrompt((1, 2)), TokenPrompt((3,))]),
        (["a", [3]], [TextPrompt("a"), TokenPrompt((3,))]),
    ],
)
def test_a_prompt_has_four_forms(prompt: object, prompts: list[object]) -> None:
    assert [request.prompt for request in parse(prompt).requests] == prompts


def test_every_option_reaches_every_prompt() -> None:
    options: dict[str, Any] = {
        "max_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 9,
        "stop": "x",
        "ignore_eos": True,
        "min_tokens": 2,
        "logit_bias": {"7": -1.5},
        "frequency_penalty": 0.5,
        "presence_penalty": -1,
        "logprobs": 4,
    }
    asked = parse(["a", "b"], n=2, cache_salt="s", prompt_cache_key="k", user="u", echo=True, **options)
    expected = options | {"stop": ("x",), "logit_bias": ((7, -1.5),), "prompt_logprobs": 4}
    for request in asked.requests:
        assert request.sampling == SamplingParams(**expected)
        assert (request.n, request.cache_salt, request.cache_key, request.request_id) == (2, "s", "k", "id-1")
    assert parse(echo=True).request.sampling.prompt_logprobs is None
    assert parse(logprobs=0).request.sampling.logprobs == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": None}, "prompt: is required"),
        ({"prompt": 5}, "prompt: must be a string or an array, is an integer"),
        ({"prompt": []}, f"prompt: must be 1 to {MAX_PROMPTS} prompts, is 0"),
        ({"prompt": ["a"] * 65}, "prompt: must be 1 to 64 prompts, is 65"),
        ({"prompt": [1, "a"]}, "prompt[1]: must be a token id, is a string"),
        ({"prompt": [1, True]}, "prompt[1]: must be a token id, is a boolean"),
        ({"prompt": [True]}, "prompt[0]: must be a string or an array of token ids, is a boolean"),
        ({"prompt": ["a", 1]}, "prompt[1]: must be a string or an array of token ids, is an integer"),
        ({"prompt": [[1], [2, 3.0]]}, "prompt[1][1]: must be a token id, is a number"),
        ({"logprobs": True}, "logprobs: must be an integer, is a boolean"),
        ({"logprobs": 21}, "logprobs: must be between 0 and 20, is 21"),
        ({"echo": 1}, "echo: must be a boolean, is an integer"),
        (
            {"prompt": ["a", "b", "c"], "n": 3, "echo": True, "logprobs": 0},
            "prompt: with echo and logprobs must ask for at most 8 answers, asks for 9",
        ),
        ({"suffix": "x"}, "suffix: is not supported, other than ''"),
        ({"best_of": 3}, "best_of: is not supported, other than 1"),
        ({"messages": []}, "messages: is not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options: is only allowed with stream: true"),
    ],
)
def test_a_bad_body_names_field_limit_and_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_text_completion({"prompt": "hi", **fields}, "")
    assert str(caught.value) == message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "fields", "status", "param"),
    [
        ("", {}, 400, "prompt"),
        (["say a", ""], {}, 400, "prompt[1]"),
        ([[1], []], {}, 400, "prompt[1]"),
        ([1, 1000], {}, 400, "prompt[1]"),
        ([[1], [2, -1]], {}, 400, "prompt[1][1]"),
        ("\ud800", {}, 400, "prompt"),
        ("say x", {"max_tokens": 0}, 400, "max_tokens"),
        ("say x", {"n": 17}, 400, "n"),
        ("say x", {"prompt_cache_key": "k" * 257}, 400, "prompt_cache_key"),
        ("say x", {"model": "gpt-9"}, 404, "model"),
        (["say x", "refuse bad"], {}, 400, "prompt[1]"),
        ("refuse bad", {}, 400, "prompt"),
        (["say x", "refuse busy"], {}, 429, None),
        ("refuse down", {}, 503, None),
    ],
)
async def test_refusals_are_plain_statuses_in_the_bodys_words(
    frontend: ScriptedFrontend,
    http: httpx.AsyncClient,
    prompt: object,
    fields: dict[str, Any],
    status: int,
    param: str | None,
    stream: bool,
) -> None:
    body = {"model": "demo", "prompt": prompt, "stream": stream, **fields}
    response = await http.post("/v1/completions", content=json.dumps(body).encode())
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param and error["type"]
    assert param is None or error["message"].startswith(f"{param}: ")
    await frontend.until_idle()


async def test_the_official_client_gets_whole_answers(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.completions.create(model="demo", prompt=["say a b", "say c"], user="u")
    Completion.model_validate(answer.model_dump(), strict=True)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, "ab", "stop"),
        (1, "c", "stop"),
    ]
    assert (answer.id, answer.object, answer.created) == ("cmpl-made-up", "text_completion", 1234)
    assert answer.usage and answer.usage.prompt_tokens_details
    usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert usage == (10, 4, 14)
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    assert answer.choices[0].logprobs is None


async def test_the_official_client_streams(openai_client: openai.AsyncOpenAI) -> None:
    stream = await openai_client.completions.create(
        model="demo",
        prompt=["say a b", "say c"],
        stream=True,
        echo=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    texts, reasons = ["", ""], ["", ""]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert chunk.usage is None
    assert (texts, reasons) == (["say a bab", "say cc"], ["stop", "stop"])
    assert chunks[-1].choices == [] and chunks[-1].usage and chunks[-1].usage.completion_tokens == 4


async def test_a_token_without_text_is_a_piece_of_its_own(http: httpx.AsyncClient) -> None:
    pieces = events((await post(http, "say a b", stream=True)).text)[:-1]
    assert [piece["choices"][0]["text"] for piece in pieces] == ["a", "", "b", "", ""]


async def test_an_error_in_one_stream_ends_all(frontend: ScriptedFrontend, http: httpx.AsyncClient) -> None:
    response = await post(http, ["hang a", "break b"], stream=True)
    assert events(response.text)[-1]["error"]["message"] == "the worker was lost"
    await frontend.until_idle()
    assert (await post(http, ["hang a", "break b"])).status_code == 503
    await frontend.until_idle()


def test_offsets_count_whole_characters() -> None:
    offsets = TextOffsets()
    assert [offsets.push(data) for data in (b"", "é".encode()[:1], "é".encode()[1:], b"ab", b"c")] == [
        0,
        0,
        0,
        1,
        3,
    ]


TEXT = "Draw a bird \N{BIRD} for me"


async def by_grpc(
    doors: OpenDoors, text: str, n: int, **sampling: Any
) -> tuple[list[str], list[list[float]]]:
    request = pb.GenerateRequest(text=text, n=n, sampling=pb.SamplingParams(**sampling))
    texts, logprobs = [""] * n, [list[float]() for _ in range(n)]
    async for response in doors.grpc.Generate(request):
        delta = response.delta
        if response.HasField("delta"):
            texts[delta.choice] += delta.text
            logprobs[delta.choice] += [max(p.logprob, -9999.0) for p in delta.logprobs]
    return texts, logprobs


async def streamed(doors: OpenDoors, **fields: Any) -> list[Any]:
    """The choices of a stream put together, as those of a whole answer; and the usage."""
    stream = await doors.openai.completions.create(
        model="", stream=True, stream_options={"include_usage": True}, **fields
    )
    whole: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        for news in chunk.choices:
            choice = whole.setdefault(
                news.index, {"index": news.index, "text": "", "logprobs": None, "finish_reason": None}
            )
            choice["text"] += news.text
            choice["finish_reason"] = news.finish_reason or choice["finish_reason"]
            if news.logprobs is not None:
                lists = news.logprobs.model_dump()
                old = choice["logprobs"] or {name: [] for name in lists}
                choice["logprobs"] = {name: old[name] + (lists[name] or []) for name in lists}
    return [whole[index] for index in sorted(whole)]


async def test_text_ids_streams_and_grpc_give_the_same(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with open_doors(redis_server.url, demo_gguf) as doors:
        texts, logprobs = await by_grpc(doors, TEXT, 2, max_tokens=20, logprobs=3)
        ids = list((await doors.grpc.Tokenize(pb.TokenizeRequest(text=TEXT))).token_ids)
        fields: Any = {"n": 2, "max_tokens": 20, "logprobs": 3, "temperature": 0}
        answer = await doors.openai.completions.create(model="", prompt=[TEXT, ids], **fields)
        assert [choice.text for choice in answer.choices] == texts * 2
        assert [c.logprobs and c.logprobs.token_logprobs for c in answer.choices] == logprobs * 2
        for choice in answer.choices:
            assert choice.logprobs and choice.logprobs.top_logprobs and choice.logprobs.tokens
            for token, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
                assert token in top and len(top) in (3, 4)
        assert answer.usage and answer.usage.prompt_tokens == 2 * len(ids)
        assert answer.usage.completion_tokens == 80
        whole = [choice.model_dump() for choice in answer.choices]
        assert await streamed(doors, prompt=[TEXT, ids], **fields) == whole
        again = await doors.openai.completions.create(model="", prompt=ids, max_tokens=1)
        assert again.usage and again.usage.prompt_tokens_details
        assert again.usage.prompt_tokens_details.cached_tokens == (len(ids) - 1) // 4 * 4


async def test_echo_begins_with_the_prompt_and_its_log_probabilities(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with open_doors(redis_server.url, demo_gguf) as doors:
        request = pb.GenerateRequest(text=TEXT, sampling=pb.SamplingParams(max_tokens=3, prompt_logprobs=2))
        deltas = [r.delta async for r in doors.grpc.Generate(request) if r.HasField("delta")]
        expected = [max(p.logprob, -9999.0) for delta in deltas for p in delta.prompt_logprobs]
        text = "".join(delta.text for delta in deltas)
        ids = list((await doors.grpc.Tokenize(pb.TokenizeRequest(text=TEXT))).token_ids)
        fields: Any = {"max_tokens": 3, "temperature": 0, "echo": True}
        for prompt in (TEXT, ids, ids[:1]):
            plain = await doors.openai.completions.create(model="", prompt=prompt, **fields)
            scored = await doors.openai.completions.create(model="", prompt=prompt, logprobs=2, n=2, **fields)
            assert scored.choices[0].text == plain.choices[0].text and plain.choices[0].logprobs is None
            whole = [choice.model_dump() for choice in scored.choices]
            assert await streamed(doors, prompt=prompt, logprobs=2, n=2, **fields) == whole
            if len(prompt) == 1:
                continue
            assert plain.choices[0].text == TEXT + text
            lists = scored.choices[0].logprobs
            assert (
                lists and lists.token_logprobs and lists.top_logprobs and lists.text_offset and lists.tokens
            )
            assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None
            assert lists.token_logprobs[1 : len(ids)] == expected
            assert len(lists.tokens) == len(ids) + 3
            assert lists.text_offset[len(ids)] == len(TEXT)


async def test_a_long_echo_comes_in_slices(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with open_doors(redis_server.url, demo_gguf, count=1) as doors:
        fields: Any = {"prompt": list(range(300, 900)), "max_tokens": 1, "logprobs": 0, "echo": True}
        answer = await doors.openai.completions.create(model="", **fields)
        lists = answer.choices[0].logprobs
        assert lists and lists.tokens and len(lists.tokens) == 601 and lists.top_logprobs
        assert [len(top or {}) for top in lists.top_logprobs] == [0] + [1] * 600
        stream = await doors.openai.completions.create(model="", stream=True, **fields)
        sizes = [len(c.choices[0].logprobs.tokens or []) async for c in stream if c.choices[0].logprobs]
        assert sizes == [256, 256, 88, 1]
