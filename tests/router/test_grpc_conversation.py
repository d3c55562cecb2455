"""A conversation with tools over gRPC earns its hits: each turn finds all of the turns before it."""

from __future__ import annotations

import json
import random
from pathlib import Path

from open_doors import OpenDoors, open_doors
from router_rig import BLOCK

from kvhive.client import Answer, CacheControl, Chat, ChatMessage, Tool
from kvhive.client.messages import event_of, generate_request
from kvhive.scripts.embedded_redis import EmbeddedRedis

TURNS = 10
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "year": {"type": "integer"}, "lent": {"type": "boolean"}},
    "required": ["title"],
}


def shuffled(value: object, chance: random.Random) -> object:
    """The same JSON with its keys in another order."""
    if not isinstance(value, dict):
        return value
    items = list(value.items())
    chance.shuffle(items)
    return {key: shuffled(inner, chance) for key, inner in items}


async def ask(doors: OpenDoors, chat: Chat) -> Answer:
    answer = Answer()
    async for response in doors.grpc.Generate(generate_request(chat, {"max_tokens": 13, "ignore_eos": True})):
        event = event_of(response)
        assert event is not None
        answer.take(event)
    return answer


async def test_ten_turns_with_tools_whose_keys_come_in_any_order(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    chance = random.Random(3)
    async with open_doors(redis_server.url, demo_gguf, blocks=2048) as doors:
        chat = Chat(messages=[ChatMessage(role="system", content="You are a librarian.")])
        before = 0
        for turn in range(TURNS):
            chat.messages.add(role="user", content=f"Question {turn}: is it there?")
            tools = Tool(name="find", description="Finds", parameters=json.dumps(shuffled(SCHEMA, chance)))
            del chat.tools[:]
            chat.tools.append(tools)
            answer = await ask(doors, chat)
            # The last token of an answer is nobody's input yet.
            assert answer.usage.cached_tokens >= max(0, before - 1) // BLOCK * BLOCK, f"turn {turn}"
            before = answer.usage.prompt_tokens + answer.usage.completion_tokens
            chat.messages.append(answer.choices[0].message)
            await doors.rig.indexed()
        assert answer.usage.cached_tokens > 9 * 13


async def test_a_breakpoint_is_kept_and_said_so(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    async with open_doors(redis_server.url, demo_gguf, count=1) as doors:
        system = ChatMessage(role="system", content="Be brief. " * 20, cache_control=CacheControl(ttl_s=60))
        answer = await ask(doors, Chat(messages=[system, ChatMessage(role="user", content="Hi")]))
        (kept,) = answer.usage.kept
        assert kept.kept and kept.ttl_s == 60.0 and 40 <= kept.tokens < answer.usage.prompt_tokens
        assert answer.usage.not_kept == ""
