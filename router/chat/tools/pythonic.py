"""Llama 4 and 3.2's other way: an answer that is a Python list of calls, `[f(a=1, b="x"), g()]`.

Its arguments become JSON when a call is whole. The list may stand between `<|python_start|>` and
`<|python_end|>`.
"""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

from kvhive.router.chat.tools.calls import Calls
from kvhive.router.chat.tools.feed import Feed, NotACall, Reading
from kvhive.router.chat.tools.form import MAX_NAME_CHARS, ToolForm
from kvhive.router.chat.tools.hermes import HERMES
from kvhive.router.chat.tools.json_text import MAX_DEPTH, another

START, END = "<|python_start|>", "<|python_end|>"
MAX_CALL_CHARS = 8 * 1024
"""Of one call's arguments: Python's own parser reads them at once, and holds everything else up meanwhile."""

_WRITTEN_IN = "<arguments of a call>"
# Of odd escapes in strings. Once for all: what is ignored is the same for all threads.
warnings.filterwarnings("ignore", module=_WRITTEN_IN)

_PAIRS = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS = {"true": True, "false": False, "null": None}


def _read(calls: Calls) -> Reading[None]:
    feed = calls.feed
    started = yield from feed.optional(START)
    yield from feed.space()
    yield from feed.literal("[")
    yield from feed.space()
    more = True
    while more:
        name = yield from feed.until("(", MAX_NAME_CHARS)
        if name not in calls.tools:
            raise NotACall
        arguments = _as_json((yield from _arguments(feed)))
        calls.begin(name)
        calls.arguments(arguments)
        try:
            more = yield from another(feed, "]")
        except NotACall:
            calls.end()
            raise
        calls.end()
    if started:
        yield from feed.space()
        yield from feed.closing(END)


def _arguments(feed: Feed) -> Reading[str]:
    """Read up to and past the parenthesis that closes a call; return what stood inside."""
    feed.keep()
    try:
        awaited = [")"]
        while awaited:
            character = yield from feed.peek()
            if not character or feed.kept_chars > MAX_CALL_CHARS or len(awaited) > MAX_DEPTH:
                raise NotACall
            feed.at += 1
            if character == awaited[-1]:
                awaited.pop()
            elif character in _PAIRS:
                awaited.append(_PAIRS[character])
            elif character in ")]}":
                raise NotACall
            elif character in "'\"":
                yield from _string(feed, character)
    except NotACall:
        feed.kept()
        raise
    return feed.kept()[:-1]


def _string(feed: Feed, quote: str) -> Reading[None]:
    """Read the rest of a string of one line, or of many between three quotes."""
    triple = yield from feed.optional(quote)
    if triple and not (yield from feed.optional(quote)):
        return  # it was empty
    while True:
        character = yield from feed.peek()
        if not character or feed.kept_chars > MAX_CALL_CHARS or (character == "\n" and not triple):
            raise NotACall
        feed.at += 1
        if character == "\\" and (yield from feed.peek()):
            feed.at += 1
        elif character == quote and (not triple or (yield from feed.optional(quote * 2))):
            return


def _as_json(said: str) -> str:
    """Return keyword arguments as a JSON object. Raises NotACall."""
    try:
        call = ast.parse(f"f({said}\n)", _WRITTEN_IN, "eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise NotACall
        names = [keyword.arg for keyword in call.keywords]
        if None in names or len(set(names)) < len(names):
            raise NotACall
        values = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        found = json.dumps(values, ensure_ascii=False, allow_nan=False)
        found.encode()
        return found
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, OverflowError):
        raise NotACall from None


def _value(node: ast.expr) -> Any:
    """Return what a literal stands for, where JSON has it too; JSON's own constants count as well."""
    match node:
        case ast.Constant(str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return -number
        case ast.List(items) | ast.Tuple(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise NotACall


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(str() as key):
            return key
    raise NotACall


PYTHONIC = ToolForm(
    name="pythonic",
    read=_read,
    shape=HERMES.shape,
    enforced=HERMES,
    openers=(START,),
    leading=("[",),
    markers=(START, END),
)
