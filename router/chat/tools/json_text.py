"""JSON read from a feed, strictly (RFC 8259): what cannot be JSON is seen where it goes wrong."""

from __future__ import annotations

import json
import re

from kvhive.router.chat.tools.feed import Feed, NotACall, Reading

MAX_DEPTH = 64
"""Objects and arrays inside each other; deeper is no call."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = "+-.0123456789eE"
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_BEGUN_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]*)?)?")
_MOST_NUMBER_CHARS = 400


def json_value(feed: Feed, depth: int = 0) -> Reading[None]:
    """Read one value. Raises NotACall."""
    if depth > MAX_DEPTH:
        raise NotACall
    match (yield from feed.peek()):
        case "{":
            yield from _members(feed, "}", depth)
        case "[":
            yield from _members(feed, "]", depth)
        case '"':
            yield from json_string(feed)
        case "t":
            yield from feed.literal("true")
        case "f":
            yield from feed.literal("false")
        case "n":
            yield from feed.literal("null")
        case _:
            yield from _number(feed)


def _members(feed: Feed, end: str, depth: int) -> Reading[None]:
    """Read an object or an array, its bracket first."""
    feed.at += 1
    yield from feed.space()
    if (yield from feed.optional(end)):
        return
    while True:
        if end == "}":
            yield from json_key(feed)
        yield from json_value(feed, depth + 1)
        if not (yield from another(feed, end)):
            return


def json_key(feed: Feed) -> Reading[None]:
    """Read a member's name, the colon, and the space about it."""
    yield from json_string(feed)
    yield from feed.space()
    yield from feed.literal(":")
    yield from feed.space()


def another(feed: Feed, end: str) -> Reading[bool]:
    """Read what follows a member: a comma, or `end`; tell whether it was the comma."""
    yield from feed.space()
    if (yield from feed.optional(end)):
        return False
    yield from feed.literal(",")
    yield from feed.space()
    return True


def json_string(feed: Feed, most_kept: int | None = None) -> Reading[None]:
    """Read a string. Raises NotACall also when more than `most_kept` characters are kept by then."""
    yield from feed.literal('"')
    while True:
        plain = _PLAIN.match(feed.text, feed.at)
        assert plain is not None
        feed.at = plain.end()
        if most_kept is not None and feed.kept_chars > most_kept:
            raise NotACall
        character = yield from feed.peek()
        if character == '"':
            feed.at += 1
            return
        if character == "\\":
            feed.at += 1
            yield from _escaped(feed)
        elif _PLAIN.fullmatch(character) is None or not character:
            raise NotACall


def _escaped(feed: Feed) -> Reading[None]:
    character = yield from feed.peek()
    if not character or character not in '"\\/bfnrtu':
        raise NotACall
    feed.at += 1
    for _ in range(4 if character == "u" else 0):
        digit = yield from feed.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            raise NotACall
        feed.at += 1


def _number(feed: Feed) -> Reading[None]:
    feed.keep()
    read = ""
    try:
        while character := (yield from feed.peek()):
            if character not in _NUMBER:
                break
            read += character
            if len(read) > _MOST_NUMBER_CHARS or _BEGUN_NUMBER.fullmatch(read) is None:
                raise NotACall
            feed.at += 1
        if _WHOLE_NUMBER.fullmatch(read) is None:
            raise NotACall
    finally:
        feed.kept()


def json_text(feed: Feed, most: int | None = None) -> Reading[str]:
    """Read a string; return what it says.

    Raises NotACall, also for half of a surrogate pair, and for more than `most` characters.
    """
    feed.keep()
    try:
        yield from json_string(feed, most)
    except NotACall:
        feed.kept()
        raise
    said = str(json.loads(feed.kept()))
    if not said.isascii() and any("\ud800" <= character <= "\udfff" for character in said):
        raise NotACall
    return said
