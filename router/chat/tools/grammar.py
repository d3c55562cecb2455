"""What an output must be where a call is required: a grammar, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.grammar import MAX_GRAMMAR_BYTES, schema_in_lark
from kvhive.proto.json_schema import NAMED, read_schema
from kvhive.proto.strict_json import json_object
from kvhive.router.chat.messages import Tool, ToolChoice
from kvhive.router.chat.tools.form import CallShape, ToolForm
from kvhive.router.sampling_params import Grammar

_ANNOTATIONS = ("title", "description", "default", "examples", "$comment")
_VALUES = ("const", "enum", "required")
"""Keywords whose values are no schemas."""


def tool_grammar(
    form: ToolForm,
    tools: Sequence[Tool],
    choice: ToolChoice,
    token_id: Callable[[str], int | None],
    otherwise: Grammar | None = None,
) -> Grammar:
    """Return the grammar of one call, or several, of these tools; or of an answer that is `otherwise`.

    `token_id` gives the id of what is a special token of the vocabulary. Raises InvalidRequest naming the
    field for parameters that are no JSON Schema of an object, or one that cannot be enforced.
    """
    shape, spell = form.shape, _Speller(form.markers, token_id)
    named = [index for index, tool in enumerate(tools) if choice.name in ("", tool.name)]
    more = f"({spell(shape.joins)} call)*" if choice.parallel else ""
    rules = [f"start: calls{'' if otherwise is None else ' | answer'}"]
    rules.append(f"calls: {spell(shape.opens)} call {more} {spell(shape.closes)}")
    rules.append("call: " + " | ".join(f"call_{index}" for index in named))
    for index in named:
        tool = tools[index]
        schema = _enforced(f"tools[{index}].parameters", tool.parameters)
        rules.append(f"call_{index}: {_call(shape, tool.name, index, spell)}")
        rules.append(f"arguments_{index}: %json {schema}")
    if otherwise is not None:
        rules.append(f"answer: {_answer(otherwise)}")
    text = "\n".join(["%llguidance {}", *rules])
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            "tools", f"must be at most {MAX_GRAMMAR_BYTES} bytes where a call is enforced, are {len(text)}"
        )
    return Grammar("lark", text)


def schema_grammar(field: str, parameters: str) -> Grammar:
    """Return the grammar of one tool's arguments alone. Raises InvalidRequest naming the field."""
    return Grammar("json_schema", json.dumps(checked_parameters(field, parameters)))


def joinable(form: ToolForm, answer: Grammar) -> None:
    """Check that an answer is either calls or of this grammar: JSON, which no call begins like.

    Raises InvalidRequest.
    """
    if answer.kind not in ("json_object", "json_schema"):
        raise InvalidRequest("response_format", f"must be JSON to go with tools, is {answer.kind}")
    if "{" in form.leading:
        raise InvalidRequest(
            "response_format", "must not be JSON beside tools: this model's calls are plain JSON as well"
        )


def checked_parameters(field: str, parameters: str) -> dict[str, Any]:
    """Return a tool's parameters, a JSON Schema of an object; none given are none. Raises InvalidRequest."""
    schema = json_object(field, parameters or "{}")
    if schema.get("type", "object") != "object":
        raise InvalidRequest(
            f"{field}.type", f'must be "object", is {json.dumps(schema["type"], ensure_ascii=False)[:100]}'
        )
    if not isinstance(schema.get("properties", {}), dict):
        raise InvalidRequest(f"{field}.properties", "must be a JSON object")
    return {"type": "object", **schema}


def _call(shape: CallShape, name: str, index: int, spell: _Speller) -> str:
    said = json.dumps(name, ensure_ascii=False)[1:-1] if shape.json_name else name
    return f"{spell(shape.before + said + shape.between)} arguments_{index} {spell(shape.after)}"


def _enforced(field: str, parameters: str) -> str:
    """Return parameters as a grammar has them. Raises InvalidRequest naming the field."""
    schema = checked_parameters(field, parameters)
    try:
        return schema_in_lark(_bare(read_schema(json.dumps(schema))))
    except InvalidRequest as error:
        raise InvalidRequest(field, str(error).partition(": ")[2]) from error


def _bare(schema: Any) -> Any:
    """Return a schema without what it only says to people: of many tools that is most of it."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _bare_value(key, value) for key, value in schema.items() if key not in _ANNOTATIONS}


def _bare_value(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if key in NAMED and isinstance(value, dict):
        return {name: _bare(schema) for name, schema in value.items()}
    return _bare(value)


def _answer(otherwise: Grammar) -> str:
    text = '{"type": "object"}' if otherwise.kind == "json_object" else otherwise.text
    return f"%json {schema_in_lark(read_schema(text))}"


class _Speller:
    """Spells literal text in Lark, with special tokens where the vocabulary has them."""

    def __init__(self, markers: Sequence[str], token_id: Callable[[str], int | None]) -> None:
        found = {marker: token_id(marker) for marker in markers}
        self._ids = {marker: found_id for marker, found_id in found.items() if found_id is not None}
        self._cuts = re.compile("|".join(map(re.escape, self._ids)) or r"(?!)")

    def __call__(self, text: str) -> str:
        words, start = [], 0
        for cut in self._cuts.finditer(text):
            words += [text[start : cut.start()], f"<[{self._ids[cut.group()]}]>"]
            start = cut.end()
        spelled = [
            word if number % 2 else json.dumps(word) for number, word in enumerate([*words, text[start:]])
        ]
        return " ".join(word for word in spelled if word != '""')
