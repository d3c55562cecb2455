"""Breakpoints become numbers of tokens: what stands before one is what any prompt with that beginning has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chats import Talk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odd_texts import FRAGMENTS
from tiny_tokenizer import EOT, TEMPLATE, save_tokenizer
from tool_templates import HERMES, LLAMA, MISTRAL, PLAIN

from kvhive.proto.block_hash import unpack_tokens
from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.conversation import Conversations
from kvhive.router.chat.messages import (
    CacheBreakpoint,
    ChatMessage,
    ChatPrompt,
    Tool,
    ToolCall,
    check_chat,
)
from kvhive.router.chat.rendering import ChatRenderer
from kvhive.router.tokenizer import TextTokenizer

TOOLS = (Tool("weather", "How it will be", '{"type": "object"}'), Tool("time", "What time it is", ""))
SYSTEM, USER = ChatMessage("system", "Be brief, please."), ChatMessage("user", "hello world")
CALL = ChatMessage("assistant", "", (ToolCall("abcdefghi", "time", "{}"),))


def tokenizer_of(directory: Path, source: str) -> TextTokenizer:
    save_tokenizer(directory, "llama-bpe")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": source}))
    return TextTokenizer.load(directory)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def texts_before(
    tokenizer: TextTokenizer,
    messages: tuple[ChatMessage, ...],
    *points: CacheBreakpoint,
    tools: tuple[Tool, ...] = (),
) -> list[str]:
    """The text of the prompt before each breakpoint."""
    prompt = ChatPrompt(messages, tools, breakpoints=points)
    packed, counts = Conversations(tokenizer).encode(prompt)
    ids = unpack_tokens(packed)
    assert ids == unpack_tokens(Conversations(tokenizer).encode(ChatPrompt(messages, tools))[0]), (
        "as without them"
    )
    return [tokenizer.decode(ids[:count], skip_special_tokens=False) for count in counts]


def at(message: int | None, chars: int | None = None) -> CacheBreakpoint:
    return CacheBreakpoint(300.0, message, chars)


def test_a_breakpoint_is_at_a_messages_end_or_inside(tokenizer: TextTokenizer) -> None:
    points = at(0), at(1, 5), at(1), at(2, 0)
    assert texts_before(tokenizer, (SYSTEM, USER, USER), *points) == [
        "<|im_start|>system\nBe brief, please.",
        "<|im_start|>system\nBe brief, please.<|im_end|>\n<|im_start|>user\nhello",
        "<|im_start|>system\nBe brief, please.<|im_end|>\n<|im_start|>user\nhello world",
        "<|im_start|>system\nBe brief, please.<|im_end|>\n<|im_start|>user\nhello world<|im_end|>\n"
        "<|im_start|>user\n",
    ]


def test_a_token_that_lies_on_both_sides_is_behind(tokenizer: TextTokenizer) -> None:
    assert texts_before(tokenizer, (USER,), at(0, 3)) == ["<|im_start|>user\n"]


@pytest.mark.parametrize(
    ("source", "messages", "end"),
    [
        (HERMES, (SYSTEM, USER), "</tools><|im_end|>\n<|im_start|>user\n"),
        (HERMES, (USER, USER), "</tools><|im_end|>\n<|im_start|>user\n"),
        (LLAMA, (SYSTEM, USER, USER), "\n\n"),
        (MISTRAL, (USER,), "[/TOOLS]<|im_start|>"),  # and a space, which is of the first word's token
        (PLAIN, (SYSTEM, USER), "</tool_response>.\n\n"),
        (PLAIN, (USER,), "</tool_response>.<|im_end|>\n<|im_start|>user\n"),
    ],
)
def test_behind_the_tools_is_where_the_next_message_begins(
    source: str, messages: tuple[ChatMessage, ...], end: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tmp_path, source)
    (before,) = texts_before(tokenizer, messages, at(None), tools=TOOLS)
    assert before.endswith(end) and "What time it is" in before and "hello" not in before
    changed = (*messages[:-1], ChatMessage("user", "bye"))
    (other,) = texts_before(tokenizer, changed, at(None), tools=TOOLS)
    assert other.startswith(before), "so it is there for other questions, too"


def test_calls_end_where_their_answers_begin(tmp_path: Path) -> None:
    answer = ChatMessage("tool", "noon", tool_call_id="abcdefghi")
    (before,) = texts_before(tokenizer_of(tmp_path, HERMES), (USER, CALL, answer), at(1), tools=TOOLS)
    assert before.endswith("</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n")


def test_templates_that_trim_lose_only_white_space(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, LLAMA)
    spaced = ChatMessage("user", "  hello world \n ")
    first, last = texts_before(tokenizer, (spaced, spaced), at(0), at(1))
    assert first.endswith("user\n\nhello world") and first.count("hello") == 1
    assert last.endswith("user\n\nhello world") and last.count("hello") == 2


def test_behind_a_turn_that_is_known(tokenizer: TextTokenizer) -> None:
    talk = Talk(tokenizer, {EOT})
    letters = [id for letter in "hello" for id in tokenizer.encode(letter, False)]
    turn, _ = talk.answered(ChatPrompt((USER,)), letters)
    prompt = ChatPrompt((USER, turn, USER), breakpoints=(at(1), at(1, 2), at(2)))
    packed, counts = talk.conversations.encode(prompt, "")
    before = len(talk.ids(ChatPrompt((USER,))))
    assert counts[:2] == (before + 5, before), "and inside, before it"
    assert tokenizer.decode(unpack_tokens(packed)[: counts[2]]).endswith("hello world")


def test_a_breakpoint_behind_the_end_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^cache_control: .*within the 11 characters .*, is at 12"):
        check_chat(ChatPrompt((USER,), breakpoints=(at(0, 12),)))
    check_chat(ChatPrompt((USER,), breakpoints=(at(0, 11),)))


CONTENTS = st.lists(st.sampled_from([*FRAGMENTS, "<|begin|>"]), max_size=8).map("".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(CONTENTS, min_size=1, max_size=4), other=CONTENTS, data=st.data())
def test_what_is_before_a_breakpoint_stays_when_what_follows_changes(
    tokenizer: TextTokenizer, contents: list[str], other: str, data: st.DataObject
) -> None:
    """At a message's end: as long as the template goes on alike, which begins with a control token."""
    last = len(contents) - 1
    chars = data.draw(st.integers(0, len(contents[last])) | st.none())
    messages = tuple(ChatMessage("user", content) for content in contents)
    packed, (count,) = Conversations(tokenizer).encode(ChatPrompt(messages, breakpoints=(at(last, chars),)))
    ids, text = unpack_tokens(packed), contents[last]
    beginning = text if chars is None else text[:chars]
    edited = (*messages[:last], ChatMessage("user", f"{beginning}{other}"))
    if chars is None:
        edited = (*messages, ChatMessage("user", other))
    longer = unpack_tokens(Conversations(tokenizer).encode(ChatPrompt(edited))[0])
    plain = tokenizer.decode(ids[:count], skip_special_tokens=False)
    whole = ChatRenderer(TEMPLATE, {}, 2.0).render(messages)
    assert whole.startswith(plain.rstrip("\ufffd"))
    if chars is None:
        assert longer[:count] == ids[:count]
        assert (
            len(plain)
            >= len(whole) - len(text) + len(text.rstrip()) - len("<|im_end|>\n<|im_start|>assistant\n") - 4
        )
