"""Llama 3.1 to 3.3: an answer that is a JSON object with `parameters`, alone or after `<|python_tag|>`.

Several are parted by semicolons, as vLLM's examples have them, or by white space.
"""

from __future__ import annotations

from kvhive.router.chat.tools.calls import Calls
from kvhive.router.chat.tools.feed import Reading
from kvhive.router.chat.tools.form import CallShape, ToolForm
from kvhive.router.chat.tools.json_call import call_object

TAG = "<|python_tag|>"


def _read(calls: Calls) -> Reading[None]:
    feed = calls.feed
    yield from feed.optional(TAG)
    more = True
    while more:
        yield from feed.space()
        yield from call_object(calls, needs_arguments=True)
        calls.end()
        yield from feed.space()
        more = (yield from feed.optional(";")) or (yield from feed.peek()) == "{"


LLAMA_JSON = ToolForm(
    name="llama3_json",
    read=_read,
    shape=CallShape(before='{"name": "', between='", "parameters": ', after="}", joins="; "),
    openers=(TAG,),
    leading=("{",),
    markers=(TAG,),
)
