"""DeepSeek: V3 and R1 with a name and a fenced block of JSON, V3.1 with a name and plain JSON."""

from __future__ import annotations

from kvhive.router.chat.tools.calls import Calls
from kvhive.router.chat.tools.feed import NotACall, Reading
from kvhive.router.chat.tools.form import MAX_NAME_CHARS, CallShape, ToolForm
from kvhive.router.chat.tools.json_call import streamed_arguments


def _token(name: str) -> str:
    """Spell one of its special tokens: with a wide bar, and the mark of a space."""
    return f"<\uff5ctool_{name}\uff5c>".replace("_", "\u2581")


CALLS_OPEN, CALLS_CLOSE = _token("calls_begin"), _token("calls_end")
OPEN, MIDDLE, CLOSE = _token("call_begin"), _token("sep"), _token("call_end")
KIND = "function"
FENCE, FENCED = "```json", "```"


def _read(calls: Calls) -> Reading[None]:
    feed = calls.feed
    yield from feed.literal(CALLS_OPEN)
    more = True
    while more:
        yield from feed.space()
        yield from feed.literal(OPEN)
        yield from _call(calls, (yield from feed.until(MIDDLE, MAX_NAME_CHARS)).strip())
        yield from feed.space()
        yield from feed.closing(CLOSE)
        calls.end()
        yield from feed.space()
        more = not (yield from feed.closing(CALLS_CLOSE))


def _call(calls: Calls, said: str) -> Reading[None]:
    feed = calls.feed
    yield from feed.space()
    if said != KIND or (yield from feed.peek()) == "{":
        yield from streamed_arguments(calls, said)
        return
    name = (yield from feed.until("\n", MAX_NAME_CHARS)).strip()
    yield from feed.space()
    yield from feed.literal(FENCE)
    yield from feed.space()
    if name not in calls.tools:
        raise NotACall
    yield from streamed_arguments(calls, name)
    yield from feed.space()
    yield from feed.closing(FENCED)


_MARKERS = (CALLS_OPEN, CALLS_CLOSE, OPEN, MIDDLE, CLOSE)
DEEPSEEK = ToolForm(
    name="deepseek_v3",
    read=_read,
    shape=CallShape(
        opens=CALLS_OPEN,
        before=f"{OPEN}{KIND}{MIDDLE}",
        between=f"\n{FENCE}\n",
        after=f"\n{FENCED}{CLOSE}",
        joins="\n",
        closes=CALLS_CLOSE,
        json_name=False,
    ),
    openers=(CALLS_OPEN,),
    markers=_MARKERS,
)
DEEPSEEK_V31 = ToolForm(
    name="deepseek_v31",
    read=_read,
    shape=CallShape(
        opens=CALLS_OPEN, before=OPEN, between=MIDDLE, after=CLOSE, closes=CALLS_CLOSE, json_name=False
    ),
    openers=(CALLS_OPEN,),
    markers=_MARKERS,
)
