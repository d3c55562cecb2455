"""Short work is done on the event loop, and only that; what comes of it is the same."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import save_tokenizer

from kvhive.proto.block_hash import pack_tokens, root_hash
from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.messages import ChatMessage, ChatPrompt, ToolCall
from kvhive.router.frontend import Delta, Finished
from kvhive.router.prompt import (
    SHORT_CHARS,
    SHORT_MESSAGES,
    SLOW_IN_A_ROW,
    SLOW_S,
    UNKNOWN_CHARS,
    PromptPreparer,
)
from kvhive.router.request import GenerateRequest, Prompt, PromptPin, TextPrompt, TokenPrompt
from kvhive.router.tokenizer import TextTokenizer


class Watched:
    """A preparer, the CPU clock it reads, and the threads that tokenised for it."""

    def __init__(self, directory: Path, executor: ThreadPoolExecutor) -> None:
        self.tokenizer = TextTokenizer.load(directory)
        self.threads: list[str] = []
        self.seconds_a_look = 0.0
        self._now = 0.0
        complete = self.tokenizer.complete

        def watched(text: Any) -> bytes:
            self.threads.append(threading.current_thread().name.split("_")[0])
            return complete(text)

        self.tokenizer.complete = watched  # type: ignore[method-assign]
        self.preparer = PromptPreparer(self.tokenizer, root_hash(b"model"), 4, executor, self._clock)

    def _clock(self) -> float:
        self._now += self.seconds_a_look
        return self._now

    async def thread(self, prompt: Prompt) -> str:
        """Return who prepared it, having looked that it was right."""
        prepared = await self.preparer.prepare(GenerateRequest(prompt))
        match prompt:
            case TextPrompt(text):
                right = self.tokenizer.encode(text, add_special_tokens=True)
            case TokenPrompt(token_ids):
                right = list(token_ids)
            case ChatPrompt(messages):
                right = self.tokenizer.encode(self.tokenizer.render_chat(messages), add_special_tokens=False)
        assert list(prepared.token_ids) == right and prepared.packed == pack_tokens(right)
        assert len(prepared.keys) == len(right) // 4
        return self.threads[0 if isinstance(prompt, TokenPrompt) else -2]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "tokenizer") as executor:
        yield executor


@pytest.fixture
async def watched(tmp_path: Path, executor: ThreadPoolExecutor) -> AsyncIterator[Watched]:
    save_tokenizer(tmp_path, "llama-bpe")
    yield Watched(tmp_path, executor)


def chat(*contents: str) -> ChatPrompt:
    return ChatPrompt(tuple(ChatMessage("user", content) for content in contents))


async def test_short_prompts_stay_on_the_loop(watched: Watched) -> None:
    for prompt in (TextPrompt("hello world"), chat("hello", "world"), TokenPrompt((1, 2, 3, 4, 5))):
        watched.threads.clear()
        assert await watched.thread(prompt) == "MainThread"


async def test_long_new_and_many_go_to_a_thread(watched: Watched) -> None:
    new = "hello" * (UNKNOWN_CHARS // 5 + 1)
    calls = (ToolCall("i" * 200, "n" * 100, "{}"),) * (SHORT_CHARS // 300)
    for prompt in (
        TextPrompt("hello " * SHORT_CHARS),
        chat(*["hello"] * (SHORT_MESSAGES + 1)),
        chat(new),
        TokenPrompt((1,) * (SHORT_CHARS + 1)),
        ChatPrompt((ChatMessage("assistant", "", calls),)),
    ):
        watched.threads.clear()
        assert await watched.thread(prompt) == "tokenizer"


async def test_what_was_seen_before_comes_back_to_the_loop(watched: Watched) -> None:
    long = " ".join(f"hello{number}" for number in range(1000))
    assert await watched.thread(TextPrompt(long)) == "tokenizer"
    for _ in range(5):
        await watched.thread(TextPrompt(long))
    assert await watched.thread(TextPrompt(long + " world")) == "MainThread"


async def test_a_template_that_is_slow_time_after_time_is_rendered_in_threads(watched: Watched) -> None:
    """Once may be chance; and other prompts have none."""
    for slow, thread in ((2, "MainThread"), (2, "MainThread"), (0, "MainThread"), (2, "MainThread")):
        watched.seconds_a_look = SLOW_S * slow
        assert await watched.thread(chat("hello")) == thread
    await watched.thread(chat("hello"))
    assert await watched.thread(TextPrompt("hello")) == "MainThread", "it takes as long, and is no chat"
    await watched.thread(chat("hello"))
    watched.seconds_a_look = 0.0
    assert await watched.thread(chat("hello")) == "tokenizer"
    assert await watched.thread(TextPrompt("hello")) == "MainThread"


async def test_a_template_that_takes_too_long_is_slow_too(watched: Watched) -> None:
    def refuses(*said: Any) -> str:
        raise InvalidRequest("messages", "the chat template took too long")

    rendered, watched.tokenizer.render_chat = watched.tokenizer.render_chat, refuses  # type: ignore[method-assign]
    watched.seconds_a_look = SLOW_S * 2
    for _ in range(SLOW_IN_A_ROW):
        with pytest.raises(InvalidRequest):
            await watched.preparer.prepare(GenerateRequest(chat("hello")))
    watched.tokenizer.render_chat = rendered  # type: ignore[method-assign]
    assert await watched.thread(chat("hello")) == "tokenizer"


async def test_a_pin_says_of_how_many_tokens_it_is(watched: Watched) -> None:
    pins = (PromptPin(300.0, 3), PromptPin(60.0))
    request = GenerateRequest(TokenPrompt((1, 2, 3, 4, 5)), pins=pins)
    assert (await watched.preparer.prepare(request)).pins == (PromptPin(300.0, 3), PromptPin(60.0, 5))
    with pytest.raises(InvalidRequest, match=r"pins\[0\].tokens: .* the prompt's 2 tokens, is 3"):
        await watched.preparer.prepare(GenerateRequest(TokenPrompt((1, 2)), pins=pins))


async def test_tokenising_knows_what_was_said_under_the_same_salt(watched: Watched) -> None:
    first = chat("hello")
    asked = GenerateRequest(first, cache_salt="key-1")
    prepared = await watched.preparer.prepare(asked)
    answers = watched.preparer.answers(asked, prepared)
    assert answers is not None
    letters = [id for letter in "hello" for id in watched.tokenizer.encode(letter, False)]
    answers.take(Delta("hello", tuple(letters)))
    answers.take(Finished("stop", None))
    messages = (*first.messages, ChatMessage("assistant", "hello"), ChatMessage("user", "x"))
    second = ChatPrompt(messages)
    again = await watched.preparer.prepare(GenerateRequest(second, cache_salt="key-1"))
    assert await watched.preparer.tokenize(second, "key-1") == list(again.token_ids)
    assert len(await watched.preparer.tokenize(second)) < len(again.token_ids)
