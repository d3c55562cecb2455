"""A conversation through the dispatcher: each turn's prompt begins with the one before and its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from redis.asyncio import Redis
from scripted_workers import ScriptedWorkers, scripted_cluster

from kvhive.proto.block_hash import unpack_tokens
from kvhive.proto.v1 import worker_pb2
from kvhive.router import prompt as prompt_module
from kvhive.router.chat.messages import CacheBreakpoint, ChatMessage, ChatPrompt
from kvhive.router.dispatcher import Dispatcher
from kvhive.router.frontend import Delta
from kvhive.router.request import GenerateRequest
from kvhive.router.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_gguf: Path) -> TextTokenizer:
    return TextTokenizer.load(demo_gguf)


@dataclass
class Speaker(ScriptedWorkers):
    """Answers every choice letter by letter, which no tokenizer would; each with another word."""

    letters: tuple[tuple[int, ...], ...] = ()

    async def generate(
        self, address: str, request: worker_pb2.WorkerGenerateRequest
    ) -> AsyncGenerator[worker_pb2.WorkerGenerateResponse, None]:
        self.requests.append(request)
        message = worker_pb2.WorkerGenerateResponse(cached_tokens=0, written_tokens=0)
        for choice in range(request.n):
            finished = worker_pb2.WorkerFinished(stopped=True)
            message.updates.add(choice=choice, token_ids=[*self.letters[choice], 2], finished=finished)
        yield message


async def said(dispatcher: Dispatcher, request: GenerateRequest) -> list[str]:
    texts = [""] * request.n
    async with aclosing(dispatcher.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                texts[event.choice] += event.text
    return texts


@pytest.mark.parametrize("short", [True, False])
async def test_every_turn_extends_the_one_before(
    index_redis: Redis, tokenizer: TextTokenizer, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of two choices the client goes on with; and in another salt, its text alone counts."""
    if not short:
        monkeypatch.setattr(prompt_module, "SHORT_ANSWER", 0)
    words = ("wonderful", "marvellous")
    spelled = tuple(tuple(tokenizer.encode(letter, False)[0] for letter in word) for word in words)
    workers, messages = Speaker(letters=spelled), list[ChatMessage]()
    with ThreadPoolExecutor(1) as executor:
        cluster = await scripted_cluster(index_redis, tokenizer, executor, count=1, workers=workers)
        for turn in range(4):
            messages.append(ChatMessage("user", f"turn {turn}"))
            request = GenerateRequest(ChatPrompt(tuple(messages)), cache_salt="a", n=2)
            assert await said(cluster.dispatcher, request) == list(words)
            executor.submit(int).result()  # what is remembered there, is
            messages.append(ChatMessage("assistant", words[turn % 2]))
        asked = [unpack_tokens(request.token_ids) for request in workers.requests]
        for turn, (before, after) in enumerate(pairwise(asked)):
            begun = [*before, *spelled[turn % 2], 2]
            assert after[: len(begun)] == begun
        prompt = ChatPrompt((*messages, ChatMessage("user", "and?")))
        plain = tokenizer.encode(tokenizer.render_chat(prompt.messages), False)
        other = await cluster.preparer.prepare(GenerateRequest(prompt, cache_salt="b"))
        assert list(other.token_ids) == plain


async def test_breakpoints_are_pins(index_redis: Redis, tokenizer: TextTokenizer) -> None:
    with ThreadPoolExecutor(1) as executor:
        cluster = await scripted_cluster(index_redis, tokenizer, executor, count=1)
        messages = (ChatMessage("system", "Be brief."), ChatMessage("user", "hello"))
        points = (CacheBreakpoint(3600.0, 0), CacheBreakpoint(300.0, 1))
        prompt = await cluster.preparer.prepare(GenerateRequest(ChatPrompt(messages, breakpoints=points)))
        first, second = prompt.pins
        assert (first.ttl_s, second.ttl_s) == (3600.0, 300.0)
        texts = [tokenizer.decode(prompt.token_ids[: pin.tokens]) for pin in prompt.pins]
        assert texts == ["system\nBe brief.", "system\nBe brief.\nuser\nhello"]
