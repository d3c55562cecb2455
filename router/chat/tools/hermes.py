"""Hermes, Qwen 2.5 and 3, and models whose template knows no tools: JSON between `<tool_call>` tags."""

from __future__ import annotations

from kvhive.router.chat.tools.calls import Calls
from kvhive.router.chat.tools.feed import Reading
from kvhive.router.chat.tools.form import CallShape, ToolForm
from kvhive.router.chat.tools.json_call import call_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _read(calls: Calls) -> Reading[None]:
    feed = calls.feed
    yield from feed.literal(OPEN)
    yield from feed.space()
    yield from call_object(calls)
    yield from feed.space()
    yield from feed.closing(CLOSE)  # some end without it
    calls.end()


HERMES = ToolForm(
    name="hermes",
    read=_read,
    shape=CallShape(
        before=f'{OPEN}\n{{"name": "', between='", "arguments": ', after=f"}}\n{CLOSE}", joins="\n"
    ),
    openers=(OPEN,),
    markers=(OPEN, CLOSE),
)
