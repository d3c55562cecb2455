"""Calls that are required: every output that the grammar allows is calls, with arguments that are valid."""

from __future__ import annotations

import json
import random
import threading

import pytest
from byte_tokenizer import byte_tokenizer

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.grammar import new_matcher
from kvhive.proto.token_vocabulary import make_tokenizer
from kvhive.router.chat.messages import ChatMessage, ChatPrompt, Tool, ToolChoice
from kvhive.router.chat.tools import tool_use
from kvhive.router.chat.tools.by_name import FORMS
from kvhive.router.chat.tools.form import ToolForm
from kvhive.router.chat.tools.tool_use import ToolReading, ToolUse
from kvhive.router.choice_output import ChoiceOutput
from kvhive.router.output_text import OutputText
from kvhive.router.request import GenerateRequest
from kvhive.router.sampling_params import Grammar, SamplingParams
from kvhive.router.token_vocabulary import token_vocabulary
from kvhive.router.tokenizer import TextTokenizer

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "exclusiveMinimum": 0, "maximum": 3},
        "unit": {"enum": ["°C", "°F", None]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 6}},
}
SCHEMAS = {
    "get_weather": WEATHER,
    "get": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "additionalProperties": False},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = tuple(Tool(name, "", json.dumps(schema)) for name, schema in SCHEMAS.items())
ANSWER = {
    "type": "object",
    "properties": {"n": {"enum": [1, 12]}},
    "required": ["n"],
    "additionalProperties": False,
}
MESSAGES = (ChatMessage("user", "hi"),)


def markers_of(form: ToolForm) -> tuple[str, ...]:
    """The special tokens of what a grammar enforces."""
    return (form.enforced or form).markers


async def let_through(grammar: Grammar) -> None:
    """Refuse nothing."""


async def prepared(
    form: ToolForm, tokenizer: TextTokenizer, choice: ToolChoice, grammar: Grammar | None = None
) -> tuple[Grammar, ToolReading]:
    request = GenerateRequest(ChatPrompt(MESSAGES, TOOLS, choice), SamplingParams(grammar=grammar))
    request, reading = await ToolUse(form, tokenizer, let_through).prepare(request)
    assert request.sampling.grammar is not None and reading is not None
    return request.sampling.grammar, reading


def walk(tokenizer: TextTokenizer, grammar: Grammar, choices: random.Random, most: int = 1000) -> list[int]:
    """Return an output of random tokens, each of which the grammar allows; it ends soon after it may."""
    matcher = new_matcher(make_tokenizer(token_vocabulary(tokenizer)), grammar.kind, grammar.text)
    end = min(tokenizer.eos_token_ids)
    tokens: list[int] = []
    while len(tokens) < most:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(tokenizer.vocab_size) if mask[i // 8] >> i % 8 & 1]
        assert allowed
        if end in allowed and (len(allowed) == 1 or choices.random() < 0.7):
            return [*tokens, end]
        tokens.append(choices.choice([i for i in allowed if i != end]))
        assert matcher.consume_token(tokens[-1])
    raise AssertionError("it does not end")


def read(
    tokenizer: TextTokenizer, reading: ToolReading, tokens: list[int]
) -> tuple[str, list[tuple[str, str]], ChoiceOutput]:
    """Return the text of an output, its calls, and how it ended."""
    output = ChoiceOutput(OutputText(tokenizer, (), 0, reading.shown), reading.parser())
    pieces = output.push(tokens)[0] + output.finish()
    calls: list[tuple[str, str]] = []
    for _, deltas in pieces:
        for delta in deltas:
            if delta.id:
                calls.append((delta.name, ""))
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return "".join(text for text, _ in pieces), calls, output


def check(name: str, arguments: str) -> None:
    """Compare arguments with the tool's schema, by another library than the one that wrote them."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", FORMS)
async def test_whatever_a_model_writes_is_valid_calls(form: str, special: bool) -> None:
    tokenizer = byte_tokenizer(markers_of(FORMS[form]) if special else ())
    grammar, reading = await prepared(FORMS[form], tokenizer, ToolChoice("required"))
    for seed in range(2):
        text, calls, output = read(tokenizer, reading, walk(tokenizer, grammar, random.Random(seed)))
        assert calls and text == "" and output.calls_tools
        for name, arguments in calls:
            check(name, arguments)


@pytest.mark.parametrize("form", FORMS)
async def test_a_named_tool_is_the_only_one_and_one_call_is_one(form: str) -> None:
    tokenizer = byte_tokenizer(markers_of(FORMS[form]))
    choice = ToolChoice("required", name="get", parallel=False)
    grammar, reading = await prepared(FORMS[form], tokenizer, choice)
    assert list(reading.tools) == ["get"]
    for seed in range(2):
        text, calls, _ = read(tokenizer, reading, walk(tokenizer, grammar, random.Random(seed)))
        assert [name for name, _ in calls] == ["get"] and text == ""


@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if "{" not in form.leading])
async def test_an_answer_in_a_format_beside_tools_is_either_that_or_calls(form: str) -> None:
    tokenizer = byte_tokenizer(markers_of(FORMS[form]))
    asked = Grammar("json_schema", json.dumps(ANSWER))
    grammar, reading = await prepared(FORMS[form], tokenizer, ToolChoice(), asked)
    matcher = new_matcher(make_tokenizer(token_vocabulary(tokenizer)), grammar.kind, grammar.text)
    answer = list(tokenizer.encode('{"n": 12}', False))
    assert matcher.try_consume_tokens(answer) == len(answer) and matcher.is_accepting()
    assert read(tokenizer, reading, answer)[:2] == ('{"n": 12}', [])
    kinds = set()
    for seed in range(8):
        text, calls, _ = read(tokenizer, reading, walk(tokenizer, grammar, random.Random(seed)))
        assert bool(text) != bool(calls)
        kinds.add(bool(calls))
        if text:
            assert isinstance(json.loads(text)["n"], int)
        for name, arguments in calls:
            check(name, arguments)
    assert kinds == {True, False}


async def test_what_cannot_be_either_is_refused() -> None:
    for form, kind in (("hermes", "regex"), ("hermes", "lark"), ("llama3_json", "json_object")):
        with pytest.raises(InvalidRequest, match=r"^response_format: must"):
            await prepared(FORMS[form], byte_tokenizer(FORMS[form].markers), ToolChoice(), Grammar(kind, "a"))  # type: ignore[arg-type]


async def use(
    choice: ToolChoice, *tools: Tool, form: ToolForm | None = FORMS["hermes"]
) -> tuple[GenerateRequest, ToolReading | None]:
    request = GenerateRequest(ChatPrompt(MESSAGES, tools, choice))
    return await ToolUse(form, byte_tokenizer(FORMS["hermes"].markers), let_through).prepare(request)


async def test_free_calls_have_no_grammar_and_no_calls_no_reader() -> None:
    request, reading = await use(ToolChoice(), *TOOLS)
    assert request.sampling.grammar is None and reading is not None and set(reading.tools) == set(SCHEMAS)
    assert (await use(ToolChoice("none"), *TOOLS))[1] is None
    assert (await use(ToolChoice(), *TOOLS, form=None))[1] is None
    assert (await use(ToolChoice()))[1] is None
    with pytest.raises(InvalidRequest, match=r"tool_choice: .*tool_format is none"):
        await use(ToolChoice("required"), *TOOLS, form=None)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("{", r"tools\[0\]\.parameters: must be a JSON object, is not JSON"),
        ("[" * 100_000, r"tools\[0\]\.parameters: must be a JSON object"),
        ('{"properties": {"a": NaN}}', r"tools\[0\]\.parameters: .*NaN"),
        ("[]", r"tools\[0\]\.parameters: must be a JSON object, is list"),
        (r'{"description": "\udc00"}', r"tools\[0\]\.parameters: .*lone surrogate"),
        ('{"type": "string"}', r'tools\[0\]\.parameters\.type: must be "object", is "string"'),
        ('{"properties": []}', r"tools\[0\]\.parameters\.properties: must be a JSON object"),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "none", "required"])
async def test_parameters_that_are_no_schema_of_an_object_are_refused(
    parameters: str, words: str, mode: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await use(ToolChoice(mode), Tool("f", "", parameters))  # type: ignore[arg-type]


async def test_more_than_a_grammar_may_be_is_refused_only_where_it_must_be_enforced() -> None:
    long = Tool("f", "", json.dumps({"properties": {"a": {"enum": ["x" * 1000] * 200}}}))
    await use(ToolChoice(), long)
    with pytest.raises(InvalidRequest, match="tools: must be at most 131072 bytes"):
        await use(ToolChoice("required"), long)


@pytest.mark.parametrize(("chars", "aside"), [(100, False), (6_000, True)])
async def test_a_long_grammar_is_made_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, chars: int, aside: bool
) -> None:
    threads: list[threading.Thread] = []

    def made(*arguments: object) -> Grammar:
        threads.append(threading.current_thread())
        return Grammar("regex", "a")

    monkeypatch.setattr(tool_use, "tool_grammar", made)
    await use(ToolChoice("required"), Tool("f", "", json.dumps({"title": "x" * chars})))
    assert [thread is not threading.main_thread() for thread in threads] == [aside]


async def test_what_a_schema_says_to_people_takes_no_room_in_a_grammar() -> None:
    """But a property of such a name is one, and values stay as they are."""
    inner = {"type": "object", "properties": {"title": {"const": {"title": "t"}}}, "required": ["title"]}
    inner |= {"description": "y" * 100, "additionalProperties": False}
    schema = {"properties": {"description": inner}, "required": ["description"], "title": "x" * 200_000}
    request, _ = await use(ToolChoice("required"), Tool("f", "", json.dumps(schema)))
    assert request.sampling.grammar is not None and "yyy" not in request.sampling.grammar.text
    tokenizer = byte_tokenizer(FORMS["hermes"].markers)
    for good, text in ((True, '{"description": {"title": {"title": "t"}}}'), (False, '{"description": {}}')):
        matcher = new_matcher(
            make_tokenizer(token_vocabulary(tokenizer)), "lark", request.sampling.grammar.text
        )
        tokens = tokenizer.encode(f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>', False)
        assert (matcher.try_consume_tokens(list(tokens)) == len(tokens)) == good


async def test_a_schema_that_cannot_be_enforced_is_named() -> None:
    """Also one that would tell the library to pass over what it does not know."""
    bad = Tool("f", "", '{"x-guidance": {"lenient": true}, "properties": {"a": {"not": {"type": "null"}}}}')
    tokenizer = byte_tokenizer(FORMS["hermes"].markers)

    async def check_grammar(grammar: Grammar) -> None:
        new_matcher(make_tokenizer(token_vocabulary(tokenizer)), grammar.kind, grammar.text)

    desk = ToolUse(FORMS["hermes"], tokenizer, check_grammar)
    prompt = ChatPrompt(MESSAGES, (*TOOLS, bad), ToolChoice("required"))
    with pytest.raises(InvalidRequest, match=rf"^tools\[{len(TOOLS)}\]\.parameters: .*not"):
        await desk.prepare(GenerateRequest(prompt))
    await desk.prepare(GenerateRequest(ChatPrompt(MESSAGES, TOOLS, ToolChoice("required"))))
