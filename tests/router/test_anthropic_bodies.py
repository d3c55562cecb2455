"""Whatever a body holds, it becomes a request or is refused by the name of a field; nothing else happens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhive.proto.errors import InvalidRequest
from kvhive.router.anthropic.request import parse_count, parse_messages
from kvhive.router.request import validate_request

EVER = {"type": "ephemeral", "ttl": "1h"}
BODY: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "be brief", "cache_control": EVER}],
    "messages": [
        {"role": "user", "content": "Rome?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rom"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no", "cache_control": EVER}],
                },
                {"type": "text", "text": "now?"},
            ],
        },
    ],
    "tools": [{"name": "weather", "input_schema": {"type": "object"}, "cache_control": EVER}],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["a"],
    "temperature": 0.5,
    "top_k": 1,
    "top_p": 0.5,
    "thinking": {"type": "adaptive"},
    "cache_control": EVER,
    "service_tier": "auto",
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


PLACES = [path for path in places(BODY) if path]
WORDS = st.sampled_from(
    [
        "text",
        "tool_use",
        "tool_result",
        "image",
        "thinking",
        "user",
        "assistant",
        "system",
        "c1",
        "5m",
        "any",
        "",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            WORDS | st.sampled_from(["type", "content", "role", "id", "cache_control"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
CHANGES = st.lists(
    st.tuples(st.sampled_from(PLACES), st.sampled_from(["put", "drop", "double"]), ANYTHING),
    min_size=1,
    max_size=4,
)


def changed(changes: list[tuple[tuple[Any, ...], str, Any]]) -> dict[str, Any]:
    """The body with something else in some of its places; a place that is gone stays so."""
    body = copy.deepcopy(BODY)
    for path, change, value in changes:
        holder: Any = body
        try:
            for key in path[:-1]:
                holder = holder[key]
            if change == "put":
                holder[path[-1]] = value
            elif change == "drop":
                del holder[path[-1]]
            else:
                holder.append(copy.deepcopy(holder[path[-1]]))
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
    return body


def known_field(field: str, body: dict[str, Any]) -> bool:
    """Whether an error names a field that this dialect has, or that the body brought."""
    name = field.partition("[")[0].partition(".")[0]
    return name in BODY or name in body or name in ("stream", "")


@settings(max_examples=100, deadline=None)
@given(CHANGES)
def test_a_body_is_read_or_refused_by_name(changes: list[tuple[tuple[Any, ...], str, Any]]) -> None:
    body = changed(changes)
    before = copy.deepcopy(body)
    try:
        asked = parse_messages(body, "id-1", "")
    except InvalidRequest as error:
        assert known_field(error.field, body), str(error)
        return
    assert repr(body) == repr(before), "reading changes nothing of a body"
    assert all(name.isascii() and name.isprintable() and "," not in name for name in asked.ignored)
    try:
        validate_request(asked.request, 1000, 8192)
    except InvalidRequest as error:
        assert known_field(asked.spell(error.field), body), str(error)


def test_the_body_that_is_changed_is_a_good_one() -> None:
    asked = parse_messages(copy.deepcopy(BODY), "id-1", "")
    validate_request(asked.request, 1000, 8192)
    assert len(asked.request.prompt.breakpoints) == 4  # type: ignore[union-attr]
    counted = {
        key: BODY[key]
        for key in ("system", "messages", "tools", "tool_choice", "output_config", "cache_control")
    }
    assert parse_count(counted, "id-1").request.prompt == asked.request.prompt
