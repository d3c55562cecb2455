"""Mistral: `[TOOL_CALLS]` and a JSON array; or, since version 11 of its tokenizer, name, `[ARGS]`, JSON."""

from __future__ import annotations

from kvhive.router.chat.tools.calls import Calls
from kvhive.router.chat.tools.feed import Reading
from kvhive.router.chat.tools.form import MAX_NAME_CHARS, CallShape, ToolForm
from kvhive.router.chat.tools.json_call import call_list, streamed_arguments

OPEN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _read(calls: Calls) -> Reading[None]:
    feed = calls.feed
    yield from feed.literal(OPEN)
    yield from feed.space()
    if (yield from feed.peek()) == "[":
        yield from call_list(calls)
        return
    named = yield from feed.until(ARGUMENTS, MAX_NAME_CHARS)
    yield from feed.space()
    yield from streamed_arguments(calls, named.partition(ID)[0].strip())
    calls.end()


MISTRAL = ToolForm(
    name="mistral",
    read=_read,
    shape=CallShape(
        opens=f"{OPEN}[", before='{"name": "', between='", "arguments": ', after="}", joins=", ", closes="]"
    ),
    openers=(OPEN,),
    markers=(OPEN, ID, ARGUMENTS),
)
MISTRAL_ARGS = ToolForm(
    name="mistral_args",
    read=_read,
    shape=CallShape(before=OPEN, between=ARGUMENTS, after="", json_name=False),
    openers=(OPEN,),
    markers=MISTRAL.markers,
)
