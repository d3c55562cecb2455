"""A call as a JSON object with a name and arguments, which most formats have somewhere inside."""

from __future__ import annotations

import json

from kvhive.router.chat.tools.calls import Calls
from kvhive.router.chat.tools.feed import NotACall, Reading
from kvhive.router.chat.tools.form import MAX_NAME_CHARS
from kvhive.router.chat.tools.json_text import another, json_text, json_value

ARGUMENTS = ("arguments", "parameters")
OTHERS = ("type", "id")
"""Members that may stand before the call is known as one; after that, any may."""


def call_object(calls: Calls, needs_arguments: bool = False) -> Reading[None]:
    """Read one, and begin its call; `calls.end` is left to who reads what stands around it.

    Name and arguments may come in either order; where the name comes first, the arguments are streamed.
    """
    feed, name, arguments, begun = calls.feed, "", "", calls.begun
    yield from feed.literal("{")
    yield from feed.space()
    while True:
        key = yield from json_text(feed, MAX_NAME_CHARS)
        yield from feed.space()
        yield from feed.literal(":")
        yield from feed.space()
        if calls.begun > begun or key in OTHERS:
            yield from json_value(feed)
        elif key == "name" and not name:
            name = yield from json_text(feed, MAX_NAME_CHARS)
            if name not in calls.tools:
                raise NotACall
            if arguments:
                _whole(calls, name, arguments)
        elif key in ARGUMENTS and name:
            yield from streamed_arguments(calls, name)
        elif key in ARGUMENTS and not arguments:
            arguments = yield from _held_arguments(calls)
        else:
            raise NotACall
        if not (yield from another(feed, "}")):
            break
    if calls.begun == begun:
        if not name or needs_arguments:
            raise NotACall
        _whole(calls, name, "{}")


def call_list(calls: Calls) -> Reading[None]:
    """Read a JSON array of such calls, its bracket first; each is ended."""
    feed = calls.feed
    yield from feed.literal("[")
    yield from feed.space()
    more = True
    while more:
        yield from call_object(calls)
        try:
            more = yield from another(feed, "]")
        except NotACall:
            calls.end()
            raise
        calls.end()


def streamed_arguments(calls: Calls, name: str) -> Reading[None]:
    """Read arguments and begin the call of `name` with them: an object, or what stands for one."""
    if (yield from calls.feed.peek()) != "{":
        _whole(calls, name, (yield from _held_arguments(calls)))
        return
    calls.begin(name)
    calls.stream()
    yield from json_value(calls.feed)
    calls.streamed()


def _held_arguments(calls: Calls) -> Reading[str]:
    """Read an object, a string that spells one, or null; return the object's text."""
    feed = calls.feed
    match (yield from feed.peek()):
        case "{":
            feed.keep()
            try:
                yield from json_value(feed)
            except NotACall:
                feed.kept()
                raise
            return feed.kept()
        case '"':
            said = yield from json_text(feed)
            if not _is_object(said):
                raise NotACall
            return said
        case _:
            yield from feed.literal("null")
            return "{}"


def _whole(calls: Calls, name: str, arguments: str) -> None:
    calls.begin(name)
    calls.arguments(arguments)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
