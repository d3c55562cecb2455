"""Granite and Phi-4-mini: `<|tool_call|>` (or `<tool_call>`) and a JSON array of calls, or one call."""

from __future__ import annotations

from kvhive.router.chat.tools.calls import Calls
from kvhive.router.chat.tools.feed import Reading
from kvhive.router.chat.tools.form import CallShape, ToolForm
from kvhive.router.chat.tools.json_call import call_list, call_object

OPEN, PLAIN_OPEN = "<|tool_call|>", "<tool_call>"
CLOSE = "<|/tool_call|>"


def _read(calls: Calls) -> Reading[None]:
    feed = calls.feed
    if not (yield from feed.optional(OPEN)):
        yield from feed.literal(PLAIN_OPEN)
    yield from feed.space()
    if (yield from feed.peek()) == "[":
        yield from call_list(calls)
    else:
        yield from call_object(calls)
        calls.end()
    yield from feed.space()
    yield from feed.closing(CLOSE)


GRANITE = ToolForm(
    name="granite",
    read=_read,
    shape=CallShape(
        opens=f"{OPEN}[", before='{"name": "', between='", "arguments": ', after="}", joins=", ", closes="]"
    ),
    openers=(OPEN, PLAIN_OPEN),
    markers=(OPEN, PLAIN_OPEN, CLOSE),
)
