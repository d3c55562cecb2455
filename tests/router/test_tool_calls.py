"""Calls of tools out of text: each format, however it is cut into pieces, and nothing is ever lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhive.router.chat.messages import MAX_TOOL_CALLS, Tool
from kvhive.router.chat.tools.by_name import FORMS
from kvhive.router.chat.tools.form import ToolForm
from kvhive.router.chat.tools.parser import MAX_HELD_SPACE, ToolCallParser
from kvhive.router.chat.tools.pythonic import MAX_CALL_CHARS
from kvhive.router.frontend import ToolCallDelta

WEATHER = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
    }
)
TOOLS = {name: Tool(name, "", WEATHER) for name in ("get_weather", "get", "search.web")}
Call = tuple[str, str]
CASES = {
    "hermes": [
        '<tool_call>\n{"name": "get", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>',
        '<tool_call>{"arguments":{"city":"Köln","days":3},"name":"get"}</tool_call>',
        '<tool_call>\n{"name": "get", "arguments": {"city": "Köln", "days": 3}}',
        '<tool_call>{"name": "get", "arguments": "{\\"city\\":\\"K\\u00f6ln\\",\\"days\\":3}"}</tool_call>',
        '<tool_call>{"id": "1", "type": "function", "name": "get", "arguments": {"city": "Köln", "days": 3},'
        ' "why": null}</tool_call>',
    ],
    "llama3_json": [
        '{"name": "get", "parameters": {"city": "Köln", "days": 3}}',
        ' \n{"type": "function", "name": "get", "parameters": {"city": "Köln", "days": 3}}\n',
        '<|python_tag|>{"name": "get", "parameters": {"city": "Köln", "days": 3}}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "get", "arguments": {"city": "Köln", "days": 3}, "id": "VvvODy9mT"}]',
        '[TOOL_CALLS][{"name": "get", "arguments": {"city": "Köln", "days": 3}}]',
    ],
    "mistral_args": [
        '[TOOL_CALLS]get[ARGS]{"city": "Köln", "days": 3}',
        '[TOOL_CALLS]get[CALL_ID]VvvODy9mT[ARGS]{"city": "Köln", "days": 3}',
        '[TOOL_CALLS] [{"name": "get", "arguments": {"city": "Köln", "days": 3}}]',
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
        '{"city": "Köln", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>"
        '{"city": "Köln", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ],
    "granite": [
        '<|tool_call|>[{"name": "get", "arguments": {"city": "Köln", "days": 3}}]',
        '<tool_call>[{"name": "get", "arguments": {"city": "Köln", "days": 3}}]',
        '<|tool_call|>{"name": "get", "arguments": {"city": "Köln", "days": 3}}<|/tool_call|>',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=get>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "<function=get><parameter=city>Köln</parameter><parameter=days>3</parameter></function>",
    ],
    "pythonic": [
        '[get(city="Köln", days=3)]',
        "<|python_start|>[get(city='K\\u00f6ln', days=3)]<|python_end|>",
        "\n[get(city='''Köln''',days=3,)]",
    ],
}
"""Ways to write the one call of ONE."""
ONE = [("get", {"city": "Köln", "days": 3})]


def read(
    form: ToolForm, pieces: Sequence[str], parallel: bool = True
) -> tuple[list[str | tuple[str, str]], ToolCallParser]:
    """Return an output as a list of texts and calls in order, each put together."""
    parser, found = ToolCallParser(form, TOOLS, parallel), []
    for piece in pieces:
        found += parser.push(piece)
    found += parser.finish()
    order: list[str | tuple[str, str]] = []
    ids: list[str] = []
    for each in found:
        if isinstance(each, str):
            assert each
            if order and isinstance(order[-1], str):
                order[-1] += each
            else:
                order.append(each)
        elif each.id:
            assert each.index == len(ids) and each.name and re.fullmatch("call_[0-9a-f]{24}", each.id)
            ids.append(each.id)
            order.append((each.name, each.arguments))
        else:
            assert each.index == len(ids) - 1 and each.arguments
            name, arguments = order[-1]  # a call is never interrupted
            order[-1] = (name, arguments + each.arguments)
    assert len(set(ids)) == len(ids)
    return order, parser


def whole(form: str, text: str, **fields: bool) -> list[str | tuple[str, str]]:
    return read(FORMS[form], [text], **fields)[0]


def texts_of(order: Sequence[str | tuple[str, str]]) -> str:
    return "".join(each for each in order if isinstance(each, str))


def calls_of(order: Sequence[str | tuple[str, str]]) -> list[tuple[str, object]]:
    return [(each[0], json.loads(each[1])) for each in order if not isinstance(each, str)]


def written(form: ToolForm, calls: Sequence[Call]) -> str:
    """Write calls as the format's shape says: what a grammar enforces."""
    shape = form.shape
    return (
        shape.opens
        + shape.joins.join(
            shape.before
            + (json.dumps(name)[1:-1] if shape.json_name else name)
            + shape.between
            + arguments
            + shape.after
            for name, arguments in calls
        )
        + shape.closes
    )


@pytest.mark.parametrize(("form", "text"), [(form, text) for form in CASES for text in CASES[form]])
def test_a_call_is_read_in_each_way_that_models_write_it(form: str, text: str) -> None:
    order, parser = read(FORMS[form], [text])
    assert calls_of(order) == ONE and texts_of(order) == "" and parser.complete == 1
    assert read(FORMS[form], list(text))[0] == order


def test_all_formats_are_tested() -> None:
    assert set(CASES) == set(FORMS)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(TOOLS)), st.dictionaries(st.text(), VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("form", FORMS)
@given(calls=CALLS, ascii_only=st.booleans(), data=st.data())
@settings(max_examples=12)
def test_calls_come_back_as_they_were_written(
    form: str, calls: list[tuple[str, object]], ascii_only: bool, data: st.DataObject
) -> None:
    """In the form that a grammar enforces, byte by byte, whatever the pieces."""
    spelled = [(name, json.dumps(value, ensure_ascii=ascii_only)) for name, value in calls]
    enforced = FORMS[form].enforced or FORMS[form]
    text = written(enforced, spelled)
    order, parser = read(enforced, cut(text, data))
    assert order == spelled and parser.complete == len(calls)


def cut(text: str, data: st.DataObject) -> list[str]:
    """Cut a text into pieces of any size."""
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


MARKS = sorted({part for form in FORMS.values() for part in (*form.openers, *form.leading, *form.markers)})
WORDS = """get get_weather nobody {"name": "arguments": "parameters": {"city":"x"} { } [ ] " \\ , ; ( )
= city= 'x' 1 true null e+ - . <function=get> <parameter=city> </parameter> </function>
```json ``` function < | tool <tool é 😀"""
PIECES = [
    *MARKS,
    *WORDS.split(),
    '{"name": "get", ',
    "\n",
    " ",
    "\n\n",
    "x" * 300,
    " " * 70,
    "Text. ",
    "\x00",
    "\ud7ff",
]
MESSES = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=25).map("".join)
MANGLED = st.builds(
    lambda text, start, end, put: text[:start] + put + text[end:],
    st.sampled_from([text for texts in CASES.values() for text in texts]),
    st.integers(0, 120),
    st.integers(0, 120),
    st.sampled_from(PIECES) | st.text(max_size=5),
)


@pytest.mark.parametrize("form", FORMS)
@given(text=MESSES | MANGLED | st.builds(str.__add__, MANGLED, MESSES), data=st.data())
@settings(max_examples=40)
def test_any_text_in_any_pieces_gives_the_same_and_loses_nothing(
    form: str, text: str, data: st.DataObject
) -> None:
    """What is no call comes out as it is, in order; what is one is somewhere in the text."""
    order, parser = read(FORMS[form], [text])
    assert read(FORMS[form], cut(text, data))[0] == order
    assert read(FORMS[form], list(text))[0] == order
    if not parser._calls.begun:
        assert texts_of(order) == text
    place = 0
    for each in order:
        if isinstance(each, str):
            place = text.index(each, place) + len(each)
        elif FORMS[form] not in (FORMS["pythonic"], FORMS["qwen3_coder"]):
            assert each[0] in text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 3])
def test_text_around_calls_stays_text(form: str, size: int) -> None:
    """But for white space beside a call, which is the call's."""
    call = written(FORMS[form].enforced or FORMS[form], [("get", '{"city": "x"}'), ("get_weather", "{}")])
    leads = not (FORMS[form].enforced or FORMS[form]).openers or form == "llama3_json"
    text = f"{'' if leads else 'I look. '}\n{call}\n Done <b>now</b>. "
    enforced = FORMS[form].enforced or FORMS[form]
    order, _ = read(enforced, [text[i : i + size] for i in range(0, len(text), size)])
    calls = [("get", '{"city": "x"}'), ("get_weather", "{}")]
    assert order == [*(() if leads else ("I look.",)), *calls, "Done <b>now</b>. "]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get", "arguments": 3}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get", "arguments": "[1]"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get", "argum'),
        ("hermes", "<tool_call>get(city)</tool_call>"),
        ("hermes", '<tool_call>{"name": "get", "args": {"city": "x"}}</tool_call>'),
        ("llama3_json", '{"name": "get"}'),
        ("llama3_json", '{"answer": {"name": "get", "parameters": {}}}'),
        ("llama3_json", 'Here: {"name": "get", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]nobody[ARGS]{}"),
        ("mistral", "[TOOL_CALLS][]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("pythonic", "[get(city)]"),
        ("pythonic", "[get(city=open('/etc/passwd'))]"),
        ("pythonic", "[get(city=1"),
        ("pythonic", "[1, 2, 3]"),
        ("qwen3_coder", "<tool_call><function=nobody></function></tool_call>"),
    ],
)
def test_what_is_no_call_stays_text(form: str, text: str) -> None:
    assert whole(form, text) == [text] and read(FORMS[form], list(text))[0] == [text]


def test_a_call_that_breaks_off_stays_as_far_as_it_came_and_the_rest_is_text() -> None:
    cut = '<tool_call>{"name": "get", "arguments": {"city": "x'
    order, parser = read(FORMS["hermes"], [cut])
    assert order == [("get", '{"city": "x')] and parser.complete == 0
    broken = '<tool_call>{"name": "get", "arguments": {"city": x}}</tool_call>'
    order, parser = read(FORMS["hermes"], [broken])
    assert order == [("get", '{"city": '), "x}}</tool_call>"] and parser.complete == 0


@pytest.mark.parametrize("form", FORMS)
def test_an_output_that_breaks_off_behind_the_arguments_is_a_call_and_no_text(form: str) -> None:
    """What closes calls is theirs, also where there is only a part of it."""
    text = CASES[form][0]
    begun = (
        text.index("</function>") + 11
        if form == "qwen3_coder"
        else text.index("3}" if "3}" in text else "3)") + 2
    )
    for cut in range(begun + 1, len(text) + 1):
        order, _ = read(FORMS[form], [text[:cut]])
        assert calls_of(order) == ONE and texts_of(order) == ""


def test_the_second_call_of_a_list_may_be_none() -> None:
    text = '[TOOL_CALLS][{"name": "get", "arguments": {}}, {"name": "nobody", "arguments": {}}]'
    assert whole("mistral", text) == [("get", "{}"), '{"name": "nobody", "arguments": {}}]']


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = ToolCallParser(FORMS["hermes"], TOOLS)
    head = '<tool_call>\n{"name": "get", "arguments": '
    assert parser.push(head) == []
    begun = parser.push('{"city"')
    assert [(each.name, each.arguments) for each in begun if isinstance(each, ToolCallDelta)] == [
        ("get", ""),
        ("", '{"city"'),
    ]
    for piece in (": ", '"Kö', "ln", '", "days": 1', "2"):
        assert parser.push(piece) == [ToolCallDelta(0, arguments=piece)]
    assert parser.push("}}") == [ToolCallDelta(0, arguments="}")]
    assert parser.push("\n</tool_call>") == [] and parser.complete == 1


def test_text_is_held_no_longer_than_it_may_be_a_call() -> None:
    parser = ToolCallParser(FORMS["hermes"], TOOLS)
    assert parser.push("a <b> c <too") == ["a <b> c"]
    assert parser.push("th> d\n") == [" <tooth> d"]
    assert parser.push("\n\n") == [] and parser.push("e") == ["\n\n\ne"]
    assert parser.push("\n" * 100) == ["\n" * (100 - MAX_HELD_SPACE)]
    assert parser.push("<tool_call>{") == [] and parser.push('"x') == []
    assert parser.push('"') == [] and parser.push(":") == [] and parser.push("1") != []
    llama = ToolCallParser(FORMS["llama3_json"], TOOLS)
    assert (
        llama.push('{"ans') == [] and llama.push('wer"') == [] and llama.push(": 1") == ["{", '"answer": 1']
    )


def test_one_call_at_most_where_more_are_not_wanted() -> None:
    calls = written(FORMS["hermes"], [("get", "{}"), ("get", "{}")])
    order, parser = read(FORMS["hermes"], [calls], parallel=False)
    assert parser.sated and order == [
        ("get", "{}"),
        '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>',
    ]


def test_no_more_calls_than_a_message_may_have() -> None:
    calls = written(FORMS["hermes"], [("get", "{}")] * (MAX_TOOL_CALLS + 1))
    order, parser = read(FORMS["hermes"], [calls])
    assert parser.complete == MAX_TOOL_CALLS and "<tool_call>" in texts_of(order)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("x=1.5, y=-2, z=None", {"x": 1.5, "y": -2, "z": None}),
        ("x=True, y=false, z=null", {"x": True, "y": False, "z": None}),
        ("x=[1, (2, 3)], y={'a': {'b': ''}}", {"x": [1, [2, 3]], "y": {"a": {"b": ""}}}),
        (r"""x="a\"b)]", y='it\'s', z='''a'b\n'''""", {"x": 'a"b)]', "y": "it's", "z": "a'b\n"}),
        ("", {}),
    ],
)
def test_python_arguments_become_json(said: str, meant: object) -> None:
    assert calls_of(whole("pythonic", f"[get({said}), get()]")) == [("get", meant), ("get", {})]


def test_python_arguments_that_take_long_to_parse_stay_text() -> None:
    """Everything else waits for Python's parser."""
    longest = MAX_CALL_CHARS - len("x='')")
    assert calls_of(whole("pythonic", f"[get(x='{'a' * longest}')]")) == [("get", {"x": "a" * longest})]
    too_long = f"[get(x={'[],' * (MAX_CALL_CHARS // 3)})]"
    assert MAX_CALL_CHARS <= 8192 and whole("pythonic", too_long) == [too_long]


def test_odd_escapes_in_python_arguments_are_nobodys_warning_and_change_no_filters() -> None:
    """Filters are the same for all threads."""
    code = (
        "import warnings; from kvhive.router.chat.tools import pythonic\n"
        "warnings.catch_warnings = None\n"
        r"""print(pythonic._as_json(r"x='\d'"))"""
    )
    done = subprocess.run(
        [sys.executable, "-P", "-W", "always", "-c", code], capture_output=True, text=True, check=True
    )
    assert (json.loads(done.stdout), done.stderr) == ({"x": r"\d"}, "")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("<parameter=city>\n3\n</parameter>", {"city": "3"}),
        ("<parameter=days>\n3\n</parameter>", {"days": 3}),
        ("<parameter=days>\nthree\n</parameter>", {"days": "three"}),
        ('<parameter=where>\n{"a": [1]}\n</parameter>', {"where": {"a": [1]}}),
        ("<parameter=other>\nTrue\n</parameter>", {"other": True}),
        ("<parameter=city>\n\n line 1\nline <2>\n\n</parameter>", {"city": "\n line 1\nline <2>\n"}),
        ("", {}),
    ],
)
def test_values_between_tags_mean_what_the_schema_says(said: str, meant: object) -> None:
    text = f"<tool_call>\n<function=get>\n{said}\n</function>\n</tool_call>"
    assert calls_of(whole("qwen3_coder", text)) == [("get", meant)]
