"""Which format a model writes its calls in is read off its chat template and vocabulary."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tool_templates import BARE, HERMES, LLAMA, MISTRAL, PLAIN

from kvhive.proto.errors import ConfigError
from kvhive.router.chat.messages import ChatMessage, Tool, ToolCall
from kvhive.router.chat.rendering import ChatRenderer
from kvhive.router.chat.tools.by_name import FORMS, detected, tool_form
from kvhive.router.chat.tools.parser import ToolCallParser
from kvhive.router.frontend import ToolCallDelta

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = {
    # what tells, out of the templates that models come with
    "hermes": [
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags",
        '{{- "<tool_call>\\n{\\"name\\": \\"" }}',
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "",
    ],
    "qwen3_coder": [
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>"
    ],
    "llama3_json": [
        'In the format {"name": function name, "parameters": dictionary of argument name and its value}.',
        '{{- "<|python_tag|>" + tool_call.name }}',
    ],
    "pythonic": [
        "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
        "{{- '<|python_start|>' }}",
    ],
    "mistral": ['{{- "[TOOL_CALLS] [" }}', "[TOOL_CALLS]{{ m.tool_calls | tojson }}"],
    "mistral_args": ["{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"],
    "deepseek_v3": [
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + "
        "'```json' + '\\n' + arguments}}"
    ],
    "deepseek_v31": [
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments}}"
    ],
    "granite": ["When a tool is required, respond with <|tool_call|> followed by a JSON list of tools used."],
}


@pytest.mark.parametrize(("name", "template"), [(n, t) for n, texts in TEMPLATES.items() for t in texts])
def test_a_template_tells(name: str, template: str) -> None:
    assert detected(template, lambda token: False).name == name


def test_every_format_is_found() -> None:
    assert set(TEMPLATES) == set(FORMS)


def test_the_docs_name_every_format() -> None:
    named = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "tools.md").read_text(), re.MULTILINE)
    assert {"auto", "none", *named} == {"auto", "none", *FORMS}


def test_a_vocabulary_tells_where_a_template_does_not() -> None:
    assert detected("[TOOL_CALLS]", lambda token: token == "[ARGS]").name == "mistral_args"
    for template, name in (("{{ tools }}", "granite"), ("{{ tools }} <tool_call>", "hermes"), ("", "hermes")):
        assert detected(template, lambda token: token == "<|tool_call|>").name == name


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("hermes", HERMES),
        ("hermes", PLAIN),  # to which the router itself describes tools
        ("hermes", BARE),
        ("llama3_json", LLAMA),
        ("mistral", MISTRAL.replace("[CALLS]", "[TOOL_CALLS]")),
    ],
)
def test_what_a_template_makes_of_calls_is_read_back(name: str, template: str) -> None:
    """The form that a model sees of its earlier calls is the one that it writes."""
    renderer = ChatRenderer(template, {"bos_token": "<s>", "eos_token": "<|im_end|>"}, 2.0)
    tools = (Tool("weather", "Of a place", '{"properties": {"place": {}}}'), Tool("time", "", ""))
    calls = (ToolCall("abcdefghi", "weather", '{"place": "Köln, \\"é\\"", "days": [1, {"a": null}]}'),)
    calls += (ToolCall("jklmnopqr", "time", "{}"),) if name != "llama3_json" else ()
    asked = ChatMessage("user", "So?")
    before = renderer.render([asked], tools)
    whole = renderer.render([asked, ChatMessage("assistant", "", calls)], tools)
    assert whole.startswith(before)
    said = whole[len(before) :].partition("<|im_end|>")[0]
    form = detected(template, lambda token: False)
    assert form.name == name
    parser = ToolCallParser(form, {tool.name: tool for tool in tools})
    found = parser.push(said) + parser.finish()
    names = [delta.name for delta in found if isinstance(delta, ToolCallDelta) and delta.id]
    assert names == [call.name for call in calls] and not [each for each in found if isinstance(each, str)]
    for index, call in enumerate(calls):
        arguments = [each.arguments for each in found if not isinstance(each, str) and each.index == index]
        assert json.loads("".join(arguments)) == json.loads(call.arguments)


def test_a_configured_name_goes_first() -> None:
    assert tool_form("auto", None, lambda token: False) is FORMS["hermes"]
    assert tool_form("none", "<tool_call>", lambda token: True) is None
    for name, form in FORMS.items():
        assert tool_form(name, "[TOOL_CALLS]", lambda token: True) is form
    with pytest.raises(
        ConfigError, match=r"router\.tool_format: must be one of auto, none, hermes, .*is 'x'"
    ):
        tool_form("x", None, lambda token: False)
