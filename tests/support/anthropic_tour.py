"""What a user of Anthropic's official client does, step by step, whatever cluster is behind it."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import pytest

RULES = "You are the desk of a public library. " + " ".join(
    f"Rule {n}: books on shelf {n} may be borrowed for {n + 7} days, and no longer." for n in range(40)
)
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Says what the sky is like in a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Oslo", "Rom", "Zürich"]},
            "days": {"type": "integer", "enum": [1, 2, 3]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK: dict[str, Any] = {
    "name": "clock",
    "description": "Says how late it is.",
    "input_schema": {
        "type": "object",
        "properties": {"zone": {"type": "string", "enum": ["CET", "UTC"], "description": "Where."}},
        "additionalProperties": False,
    },
}
EVER: dict[str, Any] = {"type": "ephemeral"}


@dataclass(frozen=True)
class Visitor:
    """A client, and what it knows of the cluster."""

    claude: anthropic.AsyncAnthropic
    model: str
    block: int
    """Tokens of a block."""

    async def ask(self, content: Any, **fields: Any) -> anthropic.types.Message:
        """Send one user's message, or a conversation, and be greedy unless told otherwise."""
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        extra = {"temperature": fields.pop("temperature", 0)}  # which this client's signature no longer has
        return await self.claude.messages.create(
            **{"model": self.model, "max_tokens": 16, "messages": messages, "extra_body": extra} | fields
        )

    async def stream(self, content: str, **fields: Any) -> anthropic.types.Message:
        """The same, streamed and put together by the client."""
        asked: dict[str, Any] = {"model": self.model, "max_tokens": 16, "extra_body": {"temperature": 0}}
        asked["messages"] = [{"role": "user", "content": content}]
        async with self.claude.messages.stream(**asked | fields) as stream:
            return await stream.get_final_message()


Step = Callable[[Visitor], Awaitable[None]]


def prompt_tokens(message: anthropic.types.Message) -> int:
    """All of a request's input, by its usage."""
    usage = message.usage
    return (
        usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    )


def text_of(message: anthropic.types.Message) -> str:
    """All text of an answer."""
    return "".join(block.text for block in message.content if block.type == "text")


async def a_message_whole_and_streamed(visitor: Visitor) -> None:
    """Both ways bring the same; counting says how long the prompt is."""
    whole = await visitor.ask("How many books may I borrow?", system="Be brief.")
    assert whole.role == "assistant" and whole.model == visitor.model and whole.id.startswith("msg_")
    assert whole.stop_reason in ("max_tokens", "end_turn")
    assert 1 <= whole.usage.output_tokens <= 16
    streamed = await visitor.stream("How many books may I borrow?", system="Be brief.")
    assert text_of(streamed) == text_of(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert prompt_tokens(streamed) == prompt_tokens(whole)
    counted = await visitor.claude.messages.count_tokens(
        model=visitor.model,
        system="Be brief.",
        messages=[{"role": "user", "content": "How many books may I borrow?"}],
    )
    assert counted.input_tokens == prompt_tokens(whole)


async def stop_sequences(visitor: Visitor) -> None:
    """An answer ends before the words that it was not to say, and says which they were."""
    text = text_of(await visitor.ask("Tell me of a shelf.", max_tokens=24))
    words = [word for word in text.split() if word.isascii()]
    assert words, "the model says too little for this step"
    stop = words[len(words) // 2]
    for answer in (
        await visitor.ask("Tell me of a shelf.", max_tokens=24, stop_sequences=[stop]),
        await visitor.stream("Tell me of a shelf.", max_tokens=24, stop_sequences=[stop]),
    ):
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
        assert text_of(answer) == text[: text.index(stop)]


async def cache_control(visitor: Visitor) -> None:
    """A marked prefix is written to stay, then read; usage says so, split by TTL, and streamed as well."""
    seed = f"(desk {random.randrange(10**9)}) "
    system = [{"type": "text", "text": seed + RULES, "cache_control": EVER | {"ttl": "1h"}}]
    asked: dict[str, Any] = {"system": system, "cache_control": EVER}
    first = await visitor.ask("Until when are you open?", **asked)
    assert first.usage.cache_creation and first.usage.cache_creation_input_tokens
    created = first.usage.cache_creation
    assert created.ephemeral_1h_input_tokens >= 500
    assert created.ephemeral_1h_input_tokens % visitor.block == 0
    assert (
        created.ephemeral_1h_input_tokens + created.ephemeral_5m_input_tokens
        == first.usage.cache_creation_input_tokens
    )
    report = first.usage.model_extra["kvhive"] if first.usage.model_extra else {}
    assert [prefix["kept"] for prefix in report["kept"]] == [True, True] and not report["not_kept"]
    again = await visitor.ask("May I bring a dog?", **asked)
    assert again.usage.cache_read_input_tokens is not None
    assert again.usage.cache_read_input_tokens >= created.ephemeral_1h_input_tokens
    streamed = await visitor.stream("May I bring a dog?", **asked)
    assert streamed.usage.cache_read_input_tokens is not None
    assert streamed.usage.cache_read_input_tokens >= again.usage.cache_read_input_tokens
    assert prompt_tokens(streamed) == prompt_tokens(again)


async def prewarming(visitor: Visitor) -> None:
    """With max_tokens 0 the prompt is computed and nothing is said; who asks then hits it."""
    system = f"(desk {random.randrange(10**9)}) " + RULES
    warmed = await visitor.ask("Hello?", max_tokens=0, system=system)
    assert (warmed.content, warmed.usage.output_tokens) == ([], 0)
    asked = await visitor.ask("Hello?", system=system)
    full = (prompt_tokens(asked) - 1) // visitor.block * visitor.block
    assert asked.usage.cache_read_input_tokens == full, f"{warmed.usage}, then {asked.usage}"


async def a_required_tool(visitor: Visitor) -> None:
    """A tool that must be called is, with valid arguments; its result is answered."""
    asked: dict[str, Any] = {"tools": [WEATHER, CLOCK], "max_tokens": 100, "temperature": 1}
    question = {"role": "user", "content": "What is the sky like?"}
    called = await visitor.ask(
        [question],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        **asked,
    )
    assert called.stop_reason == "tool_use"
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert call.name == "weather"
    assert call.input["city"] in ("Oslo", "Rom", "Zürich") and call.input["days"] in (1, 2, 3)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    failed = {**result, "is_error": True, "cache_control": EVER}
    for outcome in (result, failed):
        answer = await visitor.ask(
            [question, called.to_param(), {"role": "user", "content": [outcome]}],
            tools=[WEATHER, CLOCK],
            tool_choice={"type": "none"},
        )
        assert answer.stop_reason in ("end_turn", "max_tokens")
    streamed = await visitor.stream(
        "What is the sky like?",
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=100,
    )
    (call,) = [block for block in streamed.content if block.type == "tool_use"]
    assert call.name in ("weather", "clock") and streamed.stop_reason == "tool_use"


async def structured_output(visitor: Visitor) -> None:
    """A format's schema is obeyed at temperature 1."""
    schema = {**WEATHER["input_schema"], "type": "object"}
    answer = await visitor.ask(
        "The weather, please.",
        output_config={"format": {"type": "json_schema", "schema": schema}},
        max_tokens=100,
        temperature=1,
    )
    said = json.loads(text_of(answer))
    assert said["city"] in ("Oslo", "Rom", "Zürich") and said["days"] in (1, 2, 3)


def shuffled(value: Any) -> Any:
    """The same JSON with the keys of its objects in another order."""
    if isinstance(value, dict):
        keys = random.sample(sorted(value), len(value))
        return {key: shuffled(value[key]) for key in keys}
    return value


async def ten_turns_with_tools(visitor: Visitor) -> None:
    """Each turn hits all full blocks of the prompt and answer before, however the tools' keys are ordered."""
    system = f"(desk {random.randrange(10**9)}) Be brief."
    messages: list[Any] = []
    before = 0
    for turn in range(10):
        messages.append({"role": "user", "content": f"Question {turn}: what of shelf {turn * 7}?"})
        answer = await visitor.ask(
            messages, system=system, tools=[shuffled(WEATHER), shuffled(CLOCK)], max_tokens=12
        )
        hit = answer.usage.cache_read_input_tokens
        assert hit is not None and hit >= before, f"turn {turn} hit {hit} of {before} tokens"
        # The last token of an answer is never computed on, so it is in no block yet.
        before = (prompt_tokens(answer) + answer.usage.output_tokens - 1) // visitor.block * visitor.block
        messages.append(answer.to_param())


async def errors(visitor: Visitor) -> None:
    """Each wrong request raises what the client's users catch."""
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.role"):
        await visitor.ask([{"role": "robot", "content": "x"}])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await visitor.ask("x", max_tokens=20_000)
    with pytest.raises(anthropic.BadRequestError, match="at most 4"):
        await visitor.ask(
            [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": EVER}] * 5}]
        )
    with pytest.raises(anthropic.NotFoundError):
        await visitor.ask("x", model="claude-none")
    with pytest.raises(anthropic.BadRequestError, match="image"):
        image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        await visitor.ask([{"role": "user", "content": [image]}])
    (model, *_) = [model async for model in visitor.claude.models.list()]
    assert model.id == visitor.model


STEPS: tuple[Step, ...] = (
    a_message_whole_and_streamed,
    stop_sequences,
    cache_control,
    prewarming,
    a_required_tool,
    structured_output,
    ten_turns_with_tools,
    errors,
)
