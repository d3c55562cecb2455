"""What the whole answer must be, and fields that are ignored: as the body says it, and what is answered."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pydantic
import pytest
from http_door import post, say
from scripted_frontend import ScriptedFrontend

from kvhive.proto.errors import InvalidRequest
from kvhive.router.openai.chat_request import parse_chat_completion
from kvhive.router.openai.fields import CompletionRequest
from kvhive.router.openai.text_request import parse_text_completion
from kvhive.router.sampling_params import Grammar

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> CompletionRequest:
    return parse_chat_completion({"messages": HI, **fields}, "id-1")


def text(**fields: Any) -> CompletionRequest:
    return parse_text_completion({"prompt": "hi", **fields}, "id-1")


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", **fields}}


@pytest.mark.parametrize("parse", [chat, text])
@pytest.mark.parametrize(
    ("fields", "grammar", "field"),
    [
        ({"response_format": {"type": "text"}}, None, "response_format"),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object"), "response_format"),
        (
            {"response_format": schema(schema={"b": 1, "a": "é"}, strict=True, description="d")},
            Grammar("json_schema", '{"b":1,"a":"é"}'),
            "response_format.json_schema.schema",
        ),
        ({"regex": "a+"}, Grammar("regex", "a+"), "regex"),
        ({"grammar": 'start: "a"'}, Grammar("lark", 'start: "a"'), "grammar"),
    ],
)
def test_a_format_becomes_a_grammar(
    parse: Any, fields: dict[str, Any], grammar: Grammar | None, field: str
) -> None:
    asked = parse(**fields)
    assert asked.request.sampling.grammar == grammar
    assert asked.spell(0, "response_format") == field


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "json"}, "response_format: must be an object, is a string"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type: must be text, json_object or json_schema, is 'xml'",
        ),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x: is not supported"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema: must be an object, is null",
        ),
        ({"response_format": schema()}, "response_format.json_schema.schema: must be an object, is null"),
        (
            {"response_format": schema(schema={}, strict=1)},
            "response_format.json_schema.strict: must be a boolean, is an integer",
        ),
        ({"regex": ""}, "regex: must not be empty"),
        ({"regex": "a" * 65537}, "regex: must be at most 65536 characters, is 65537"),
        ({"grammar": 5}, "grammar: must be a string, is an integer"),
        ({"regex": "a", "grammar": "b"}, "grammar: must not be given with regex"),
    ],
)
def test_a_bad_format_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert str(caught.value) == message


class Point(pydantic.BaseModel):
    x: int


async def test_the_official_clients_models_become_schemas(
    openai_client: openai.AsyncOpenAI, frontend: ScriptedFrontend
) -> None:
    answer = await openai_client.chat.completions.parse(**say('say {"x":7}'), response_format=Point)
    assert answer.choices[0].message.parsed == Point(x=7)
    grammar = frontend.requests[0].sampling.grammar
    assert grammar and grammar.kind == "json_schema" and '"required":["x"]' in grammar.text


async def test_what_was_ignored_is_named_in_the_answer(http: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {
        "metadata": {"a": "b"},
        "store": False,
        "prediction": {"type": "content", "content": "x"},
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "messages": [{"role": "user", "content": "say x", "name": "ann"}],
        "user": "obeyed",
    }
    response = await post(http, "", **fields)
    assert response.status_code == 200
    names = "metadata,store,prediction,stream_options.include_obfuscation,messages.name"
    assert response.headers["x-kvhive-ignored"] == names
    assert "x-kvhive-ignored" not in (await post(http, "say x")).headers


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stream_options", {"usage": True}, "stream_options.usage: is not supported"),
        ("skip_special_tokens", False, "skip_special_tokens: is not supported, other than true"),
        ("reasoning_effort", "low", "reasoning_effort: is not supported, other than 'none'"),
        ("guided_json", {}, "guided_json: is not supported"),
    ],
)
def test_what_would_change_the_answer_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(stream=True, **{name: value})
    assert str(caught.value) == message
