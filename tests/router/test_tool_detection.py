"""Which format a model writes its calls in is read off its chat template and vocabulary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvhive.proto.errors import ConfigError
from kvhive.router.chat.tools.by_name import FORMS, detected, tool_form

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
    template = "[TOOL_CALLS]"
    assert detected(template, lambda token: token == "[ARGS]").name == "mistral_args"


def test_a_configured_name_goes_first() -> None:
    assert tool_form("auto", None, lambda token: False) is FORMS["hermes"]
    assert tool_form("none", "<tool_call>", lambda token: True) is None
    for name, form in FORMS.items():
        assert tool_form(name, "[TOOL_CALLS]", lambda token: True) is form
    with pytest.raises(
        ConfigError, match=r"router\.tool_format: must be one of auto, none, hermes, .*is 'x'"
    ):
        tool_form("x", None, lambda token: False)
