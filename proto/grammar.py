"""What an output must be, in the words of llguidance, under the limits that router and worker both keep.

A grammar is one of four kinds: `json_object` (any JSON object), `json_schema`, `regex` or `lark`. Everything
that the caller could say about how it is read is decided here: no keyword of a schema is passed over, and
white space between the parts of a JSON text is bounded, so that a model cannot fill its output with it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.json_schema import FIELD, exact_schema, read_schema

if TYPE_CHECKING:  # loaded where a grammar is used: what computes without one needs no such library
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

GRAMMAR_KINDS = ("json_object", "json_schema", "regex", "lark")
MAX_GRAMMAR_BYTES = 128 * 1024
MAX_INDENT = 32
WHITE_SPACE = rf" |\n[ \t]{{0,{MAX_INDENT}}}"
"""Between two parts of a JSON text at most one of these: a space, or a line's end and an indentation."""
MAX_LEXER_STATES = 20_000
"""Of the automaton that a grammar's regular expressions become, at one or two kB each."""
MAX_GRAMMAR_SYMBOLS = 100_000
MAX_ROW_ITEMS = 1_200
"""What may be begun at one place: of 300 optional properties each counts four times. An ambiguous grammar
gets there within some hundred tokens, and computes for 40 ms at each, for which others' tokens wait."""
MAX_STEP_ITEMS = 20_000
"""... and be followed for one token."""
_MESSAGE_CHARS = 300
_READ_AS = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITE_SPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}


def new_matcher(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Compile a grammar. Raises InvalidRequest in the library's words.

    Takes a millisecond for a usual schema. What is made to be hard takes minutes, and the library has no
    limit for that: the router tries each grammar in a process of its own first (router/grammar_process.py).
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _spelled(kind, text), log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise InvalidRequest(FIELD, in_short(matcher.get_error()))
    warnings = matcher.get_grammar_warnings()
    if warnings:
        raise InvalidRequest(FIELD, in_short("; ".join(warnings)))
    return matcher


def parser_limits() -> LLParserLimits:
    """Return the bounds of one grammar, when it is compiled and at each token."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        max_items_in_row=MAX_ROW_ITEMS,
        step_max_items=MAX_STEP_ITEMS,
        verbose_errors=False,
    )


def schema_in_lark(schema: dict[str, Any]) -> str:
    """Return what stands after `%json` in a Lark grammar, to be read as the schema of a format is.

    Raises InvalidRequest for what cannot be read exactly.
    """
    return json.dumps({**exact_schema(schema), "x-guidance": _READ_AS})


def in_short(words: str) -> str:
    """Return what the library says of an error on one line, without the state that it shows."""
    line = " ".join(words.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MESSAGE_CHARS else line[:_MESSAGE_CHARS] + " ..."


def _spelled(kind: str, text: str) -> str:
    from llguidance import LLMatcher, grammar_from

    if kind in ("json_object", "json_schema"):
        schema = {"type": "object"} if kind == "json_object" else exact_schema(read_schema(text))
        return LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": _READ_AS}))
    if kind in ("regex", "lark"):
        return grammar_from("regex" if kind == "regex" else "lark", text)
    raise InvalidRequest(FIELD, f"must be one of {', '.join(GRAMMAR_KINDS)}, is {json.dumps(kind)[:40]}")
