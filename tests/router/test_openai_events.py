"""Prepared events are what would have been encoded piece by piece."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvhive.router.openai.events import NewsEvents, sse_event
from kvhive.router.openai.response import ChatShape
from kvhive.router.openai.text_response import TextShape

TEXTS = [
    "",
    "a",
    'quo"te',
    "back\\slash",
    "line\nbreak\r\t",
    "\u2028\x00\x7f",
    "é 你好 🐝",
    "\ufffd",
    "</script>",
]


@pytest.mark.parametrize("extra", [{}, {"usage": None}])
@pytest.mark.parametrize("kind", [ChatShape, TextShape])
def test_they_are_byte_for_byte_the_same(kind: Any, extra: dict[str, Any]) -> None:
    shape = kind('id "with" quotes', "mödel", 77)
    events = NewsEvents(shape, extra)
    for index in (0, 3, 0):
        for text in TEXTS:
            made = events.event(index, text)
            assert made == sse_event(shape.news(index, text, ()) | extra)
            assert b"\n" not in made[:-2] and made.endswith(b"\n\n")
            json.loads(made.removeprefix(b"data: "))
