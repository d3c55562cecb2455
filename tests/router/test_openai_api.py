"""Bodies become requests strictly, and every refusal names its field; answers have OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvhive.proto.errors import InvalidRequest, KvhiveError, Overloaded, Unavailable
from kvhive.router.chat.messages import ChatMessage, ChatPrompt
from kvhive.router.frontend import Delta, TokenLogprobs, TokenPiece, Usage
from kvhive.router.http_body import BodyTooLarge, parse_object
from kvhive.router.openai.chat_request import parse_chat_completion
from kvhive.router.openai.events import sse_event
from kvhive.router.openai.fields import CompletionRequest
from kvhive.router.openai.logprobs import logprob_entries
from kvhive.router.openai.response import (
    ChatShape,
    WholeChoice,
    describe_error,
    error_response,
)
from kvhive.router.sampling_params import SamplingParams

HI = [{"role": "user", "content": "hi"}]


def parse(**fields: Any) -> CompletionRequest:
    return parse_chat_completion({"messages": HI, **fields}, "id-1")


def test_absent_fields_take_openais_defaults() -> None:
    chat = parse()
    assert chat.request.sampling == SamplingParams(temperature=1.0)
    assert chat.request.prompt == ChatPrompt((ChatMessage("user", "hi"),))
    assert (chat.request.model, chat.request.request_id) == ("", "id-1")
    assert (chat.stream, chat.include_usage) == (False, False)


def test_every_supported_field_arrives() -> None:
    chat = parse(
        model="m",
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=9,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        cache_salt="s",
        prompt_cache_key="k",
        n=3,
        priority=-2,
        logprobs=True,
        top_logprobs=4,
        logit_bias={"7": -1.5, "5": 100},
        frequency_penalty=0.5,
        presence_penalty=-1,
        repetition_penalty=1.25,
        typical_p=0.75,
        min_tokens=2,
        user="ignored",
        store=True,
        metadata={"a": "b"},
    )
    assert chat.request.sampling == SamplingParams(
        max_tokens=7,
        temperature=0,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        seed=9,
        stop=("a", "b"),
        stop_token_ids=(4,),
        ignore_eos=True,
        typical_p=0.75,
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        presence_penalty=-1,
        logit_bias=((5, 100), (7, -1.5)),
        min_tokens=2,
        logprobs=4,
    )
    assert (chat.request.n, chat.request.priority) == (3, -2)
    assert parse(logprobs=True).request.sampling.logprobs == 0
    assert (chat.request.model, chat.request.cache_salt, chat.request.cache_key) == ("m", "s", "k")
    assert (chat.stream, chat.include_usage) == (True, True)
    assert parse(stop="x").request.sampling.stop == ("x",)
    assert parse(max_tokens=5, max_completion_tokens=5).request.sampling.max_tokens == 5


def test_null_is_absent() -> None:
    names = ["model", "max_tokens", "temperature", "stop", "seed", "tools", "logprobs", "stream_options"]
    assert parse(**dict.fromkeys(names)) == parse()


def test_text_parts_are_joined_with_nothing_between() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = {"role": "assistant", "content": "", "tool_calls": [], "refusal": None}
    chat = parse(messages=[{"role": "user", "content": parts}, answer])
    assert chat.request.prompt == ChatPrompt((ChatMessage("user", "ab"), ChatMessage("assistant", "")))


NEUTRAL = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "tools": [],
    "tool_choice": "auto",
    "functions": [],
    "response_format": {"type": "text"},
    "modalities": ["text"],
}


def test_unsupported_fields_may_ask_for_nothing() -> None:
    assert parse(**NEUTRAL) == parse()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("best_of", 10**6),
        ("prompt_logprobs", 1),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("reasoning_effort", "high"),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"a": 1}),
        ("temprature", 1),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match="not supported") as caught:
        parse(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": "5"}, "max_tokens: must be an integer, is a string"),
        ({"max_tokens": 5.0}, "max_tokens: must be an integer, is a number"),
        ({"max_tokens": True}, "max_tokens: must be an integer, is a boolean"),
        ({"temperature": "1"}, "temperature: must be a number, is a string"),
        ({"top_p": False}, "top_p: must be a number, is a boolean"),
        ({"n": True}, "n: must be an integer, is a boolean"),
        ({"n": 1.0}, "n: must be an integer, is a number"),
        ({"priority": "high"}, "priority: must be an integer, is a string"),
        ({"logprobs": 5}, "logprobs: must be a boolean, is an integer"),
        ({"top_logprobs": 2}, "top_logprobs: is only allowed with logprobs: true"),
        ({"top_logprobs": 10**4}, "top_logprobs: must be between 0 and 20, is 10000"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs: must be between 0 and 20, is -1"),
        ({"logprobs": True, "top_logprobs": 2.5}, "top_logprobs: must be an integer, is a number"),
        ({"logit_bias": [1]}, "logit_bias: must be an object, is an array"),
        ({"logit_bias": {"a": 1}}, "logit_bias: keys must be token ids, one is 'a'"),
        ({"logit_bias": {"-1": 1}}, "logit_bias: keys must be token ids, one is '-1'"),
        ({"logit_bias": {"05": 1}}, "logit_bias: keys must be token ids, one is '05'"),
        ({"logit_bias": {"9" * 999: 1}}, f"logit_bias: keys must be token ids, one is '{'9' * 64}...'"),
        ({"logit_bias": {"5": "1"}}, "logit_bias[5]: must be a number, is a string"),
        ({"frequency_penalty": True}, "frequency_penalty: must be a number, is a boolean"),
        ({"stream": 1}, "stream: must be a boolean, is an integer"),
        ({"model": 3}, "model: must be a string, is an integer"),
        ({"stop": 3}, "stop: must be an array, is an integer"),
        ({"stop": ["a", 3]}, "stop[1]: must be a string, is an integer"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids[1]: must be an integer, is a boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options: is only allowed with stream: true"),
        ({"messages": "hi"}, "messages: must be an array, is a string"),
        ({"messages": ["hi"]}, "messages[0]: must be an object, is a string"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: must be a string, is null"),
        (
            {"messages": [{"role": "user"}]},
            "messages[0].content: must be a string or an array of text parts, is null",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type: must be 'text', is 'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type: must be 'text', is 'input_audio'",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function: must be an object, is null",
        ),
        (
            {"max_tokens": 1, "max_completion_tokens": 2},
            "max_completion_tokens: must equal max_tokens where both are given",
        ),
    ],
)
def test_wrong_types_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert str(caught.value) == message


def test_messages_are_required() -> None:
    with pytest.raises(InvalidRequest, match="messages: is required"):
        parse_chat_completion({}, "")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": "\xff"}',
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
)
def test_whatever_is_not_a_json_object_is_the_callers_fault(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^body: "):
        parse_object(body)


def test_a_body_that_is_all_commas_is_refused_before_it_is_parsed() -> None:
    """Parsing holds up everybody, in whatever thread it runs."""
    body = b'{"metadata":[' + b"[]," * 100_000 + b"1]}"
    with pytest.raises(InvalidRequest, match="must have at most 100000 commas and brackets, has 20000"):
        parse_object(body)


def test_field_names_that_cannot_be_printed_do_not_break_the_answer() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**{"\ud800" * 100: 1})
    assert error_response(caught.value).status_code == 400


SHAPE = ChatShape("r1", "m", 1234)
USAGE = Usage(10, 3, cached_tokens=8, reachable_tokens=9, worker_id="w1", route_reason="prefix")


def test_answers_have_openais_shape() -> None:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    entries = logprob_entries(
        Delta("hi", (7,), 1, (TokenLogprobs(-0.5, ((7, -0.5), (8, -1e9))),)),
        lambda token_id: TokenPiece(f"t{token_id}", b"\xf0"),
    )
    choices = [WholeChoice(["h", "i"], None, "stop"), WholeChoice(["hi"], entries, "length")]
    whole = ChatCompletion.model_validate(SHAPE.completion(choices, USAGE), strict=True)
    assert [c.message.content for c in whole.choices] == ["hi", "hi"]
    assert [(c.index, c.finish_reason) for c in whole.choices] == [(0, "stop"), (1, "length")]
    assert whole.choices[0].logprobs is None and whole.choices[1].logprobs is not None
    (entry,) = whole.choices[1].logprobs.content or []
    assert (entry.token, entry.logprob, entry.bytes) == ("t7", -0.5, [0xF0])
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [("t7", -0.5), ("t8", -9999.0)]
    assert whole.usage is not None and whole.usage.total_tokens == 13
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 8
    chunks = [
        SHAPE.opening(0),
        SHAPE.news(0, "x"),
        SHAPE.news(3, "", entries),
        SHAPE.end(1, "length"),
        SHAPE.usage_chunk(USAGE),
    ]
    for body in chunks:
        ChatCompletionChunk.model_validate(body, strict=True)


def test_an_event_is_one_line_of_json() -> None:
    event = sse_event({"a": "line\nbreak\u2028 é\r"})
    assert event.count(b"\n") == 2 and event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: ")) == {"a": "line\nbreak\u2028 é\r"}


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "retry"),
    [
        (InvalidRequest("top_p", "bad"), 400, "invalid_request_error", "top_p", None),
        (BodyTooLarge("big"), 413, "invalid_request_error", None, None),
        (Overloaded("full"), 429, "rate_limit_error", None, "1"),
        (Unavailable("gone"), 503, "service_unavailable", None, "1"),
        (KvhiveError("secret"), 500, "server_error", None, None),
    ],
)
def test_errors_have_openais_shape(
    error: KvhiveError, status: int, kind: str, param: str | None, retry: str | None
) -> None:
    code, body = describe_error(error)
    assert (code, body["error"]["type"], body["error"]["param"]) == (status, kind, param)
    assert ("secret" in body["error"]["message"]) is False
    assert error_response(error).headers.get("retry-after") == retry
