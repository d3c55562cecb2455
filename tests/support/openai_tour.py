"""What the official `openai` client does with a server: one visit to each thing that the door offers.

The client is used as its documentation says, unmodified. Where the answer's words depend on the model, only
their form is looked at.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

HELLO: Any = [{"role": "user", "content": "Name a colour, please."}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


class Colour(pydantic.BaseModel):
    """An answer with a form."""

    name: Literal["red", "green", "blue"]
    warm: bool


@dataclass
class Tour:
    """One server, by its official client."""

    client: openai.AsyncOpenAI
    block: int
    """Tokens of a KV block."""
    model: str = ""

    async def models(self) -> None:
        """The list, and each model by its name."""
        listed = [model async for model in self.client.models.list()]
        assert listed
        self.model = listed[0].id
        assert (await self.client.models.retrieve(self.model)).id == self.model

    async def chat(self) -> None:
        """A whole answer, and the same one again as a stream."""
        fields: Any = {"model": self.model, "messages": HELLO, "max_completion_tokens": 12, "temperature": 0}
        whole = await self.client.chat.completions.create(**fields)
        assert whole.object == "chat.completion" and whole.usage
        text, reason = whole.choices[0].message.content, whole.choices[0].finish_reason
        stream = await self.client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == reason
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    async def completion(self) -> None:
        """Plain text, and token ids."""
        answer = await self.client.completions.create(
            model=self.model, prompt=["One, two,", [300, 301]], max_tokens=4
        )
        assert [choice.index for choice in answer.choices] == [0, 1]

    async def three_choices(self) -> None:
        """n=3 with a seed: three answers, the same three the next time."""
        fields: Any = {"messages": HELLO, "max_tokens": 8, "temperature": 1, "seed": 7, "n": 3}
        both = [await self.client.chat.completions.create(model=self.model, **fields) for _ in range(2)]
        texts = [[choice.message.content for choice in answer.choices] for answer in both]
        assert texts[0] == texts[1] and len(texts[0]) == 3

    async def stops(self) -> None:
        """A stop string ends the answer, and is no part of it."""
        fields: Any = {"messages": HELLO, "max_tokens": 8, "temperature": 0}
        plain = await self.client.chat.completions.create(model=self.model, **fields)
        text = plain.choices[0].message.content or ""
        stopped = await self.client.chat.completions.create(model=self.model, **fields, stop=text[2:4])
        assert stopped.choices[0].message.content == text[: text.index(text[2:4])]
        assert stopped.choices[0].finish_reason == "stop"

    async def penalties(self) -> None:
        """A bias that forces one token, again and again; and a penalty that has no say in that."""
        fields: Any = {"messages": HELLO, "max_tokens": 8, "temperature": 0, "frequency_penalty": 2}
        forced = await self.client.chat.completions.create(
            model=self.model, **fields, logit_bias={"300": 100}, logprobs=True
        )
        assert forced.choices[0].logprobs and forced.choices[0].logprobs.content
        assert len({entry.token for entry in forced.choices[0].logprobs.content}) == 1

    async def logprobs(self) -> None:
        """Every token with its alternatives, whose bytes are the text."""
        answer = await self.client.chat.completions.create(
            model=self.model, messages=HELLO, max_tokens=8, logprobs=True, top_logprobs=5
        )
        entries = answer.choices[0].logprobs
        assert entries and entries.content and answer.usage
        assert len(entries.content) == answer.usage.completion_tokens
        assert all(len(entry.top_logprobs) == 5 for entry in entries.content)
        said = b"".join(bytes(entry.bytes or []) for entry in entries.content)
        assert said.decode(errors="replace").startswith(answer.choices[0].message.content or "")

    async def cache_usage(self) -> None:
        """What was written is found the next time; another salt finds nothing."""
        words = " ".join(secrets.token_hex(2) for _ in range(40))
        fields: Any = {"model": self.model, "max_tokens": 1, "prompt_cache_key": secrets.token_hex(4)}
        messages: Any = [{"role": "system", "content": words}, *HELLO]
        first = await self._usage(messages, **fields)
        again = await self._usage(messages, **fields)
        other = await self._usage(messages, **fields, extra_body={"cache_salt": "another"})
        assert first.prompt_tokens_details.cached_tokens < self.block * 4
        assert first.prompt_tokens_details.cache_write_tokens > 0
        found = again.prompt_tokens_details.cached_tokens
        assert found == (again.prompt_tokens - 1) // self.block * self.block
        assert other.prompt_tokens_details.cached_tokens == 0

    async def prompt_cache(self) -> None:
        """Breakpoints with a lifetime: usage says what is kept; prewarming answers when it is there."""
        words = " ".join(secrets.token_hex(2) for _ in range(40))
        marked = {"type": "text", "text": words, "prompt_cache_breakpoint": {"mode": "explicit"}}
        messages: Any = [{"role": "system", "content": [marked]}, *HELLO]
        options = {"mode": "explicit", "ttl": "30m", "prewarm": True}
        fields: Any = {"model": self.model, "prompt_cache_key": secrets.token_hex(4)}
        ready = await self.client.chat.completions.create(
            messages=messages, **fields, extra_body={"prompt_cache_options": options}
        )
        assert ready.choices[0].message.content == "" and ready.usage
        assert ready.usage.completion_tokens == 0
        usage = await self._usage(
            messages,
            **fields,
            max_tokens=1,
            extra_body={"prompt_cache_options": options | {"prewarm": False}},
        )
        found = usage.prompt_tokens_details.cached_tokens
        assert found == (usage.prompt_tokens - 1) // self.block * self.block
        [kept] = usage.model_extra["kvhive"]["kept"]
        assert kept["kept"], kept
        assert kept["ttl_s"] == 1800 and 0 < kept["tokens"] <= usage.prompt_tokens
        assert kept["tokens"] % self.block == 0 and usage.model_extra["kvhive"]["not_kept"] is None

    async def kept_prompt(self) -> None:
        """A plain prompt has no parts: with a lifetime, all of it is kept."""
        prompt = " ".join(secrets.token_hex(2) for _ in range(40))
        fields: Any = {"model": self.model, "prompt": prompt, "max_tokens": 1}
        options = {"ttl": "90s", "prewarm": True}
        ready = await self.client.completions.create(**fields, extra_body={"prompt_cache_options": options})
        assert ready.choices[0].text == "" and ready.usage and ready.usage.model_extra
        assert [kept["kept"] for kept in ready.usage.model_extra["kvhive"]["kept"]] == [True]
        answer = await self.client.completions.create(**fields)
        assert answer.usage and answer.usage.prompt_tokens_details
        assert answer.usage.model_extra["kvhive"]["kept"] == []
        assert answer.usage.prompt_tokens_details.cached_tokens

    async def ignored(self) -> None:
        """What changes nothing is named in a header."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model=self.model, messages=HELLO, max_tokens=1, metadata={"a": "b"}, store=False
        )
        assert sorted(raw.headers["x-kvhive-ignored"].split(",")) == ["metadata", "store"]

    async def errors(self) -> None:
        """Errors are of the client's own classes, with the field that was wrong."""
        create = self.client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="max_tokens: must be between 1") as bad:
            await create(model=self.model, messages=HELLO, max_tokens=0)
        assert (bad.value.param, bad.value.type) == ("max_tokens", "invalid_request_error")
        with pytest.raises(openai.BadRequestError, match="is not supported") as unknown:
            await create(model=self.model, messages=HELLO, extra_body={"temprature": 1})
        assert unknown.value.param == "temprature"
        with pytest.raises(openai.BadRequestError) as tool:
            await create(model=self.model, messages=HELLO, tools=[{"type": "custom"}])  # type: ignore[typeddict-item]
        assert tool.value.param == "tools[0].type"
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="gpt-9", messages=HELLO)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            await self.client.embeddings.create(model=self.model, input="x")

    async def tokens(self) -> None:
        """/tokenize and /detokenize, which the client reaches by its plain `post`."""
        root = str(self.client.base_url).removesuffix("/v1/")
        whole = await self.client.post(f"{root}/tokenize", body={"prompt": "Hello"}, cast_to=httpx.Response)
        ids = whole.json()["tokens"]
        assert len(ids) == whole.json()["count"]
        back = await self.client.post(f"{root}/detokenize", body={"tokens": ids}, cast_to=httpx.Response)
        assert back.json()["prompt"].endswith("Hello")

    async def structured(self) -> None:
        """An answer of a pydantic model, whole and streamed, n=2, at temperature 1."""
        fields: Any = {"model": self.model, "messages": HELLO, "max_tokens": 100, "seed": 7, "n": 2}
        answer = await self.client.chat.completions.parse(**fields, response_format=Colour)
        assert all(isinstance(choice.message.parsed, Colour) for choice in answer.choices)
        async with self.client.chat.completions.stream(**fields, response_format=Colour) as stream:
            streamed = await stream.get_final_completion()
        assert all(isinstance(choice.message.parsed, Colour) for choice in streamed.choices)
        number = await self.client.chat.completions.create(
            model=self.model, messages=HELLO, max_tokens=20, extra_body={"regex": "[0-9]{3}"}
        )
        assert (number.choices[0].message.content or "").isdecimal()

    async def tools(self) -> None:
        """A call that is asked for, whole and streamed, and its answer sent back."""
        fields: Any = {"model": self.model, "max_tokens": 200, "tools": [WEATHER, TIME], "seed": 7}
        one: Any = {**fields, "parallel_tool_calls": False}
        named = {"type": "function", "function": {"name": "get_weather"}}
        messages: list[Any] = [*HELLO]
        answer = await self.client.chat.completions.create(messages=messages, tool_choice=named, **one)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls" and message.tool_calls
        for call in message.tool_calls:
            assert call.type == "function" and call.function.name == "get_weather"
            assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        async with self.client.chat.completions.stream(
            messages=messages, tool_choice="required", **one
        ) as stream:
            streamed = (await stream.get_final_completion()).choices[0].message
        assert streamed.tool_calls and len(streamed.tool_calls) == 1
        assert streamed.tool_calls[0].function.name in ("get_weather", "get_time")
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in message.tool_calls]
        fields["max_tokens"] = 20
        after = await self.client.chat.completions.create(messages=messages, tool_choice="none", **fields)
        assert after.choices[0].message.tool_calls is None

    async def growing_chat(self) -> None:
        """Ten turns with tools that may be called."""
        await self._grow(10, 16, lambda turn: "auto")

    async def calling_chat(self) -> None:
        """Four turns, of which every other one calls a tool."""
        await self._grow(4, 64, lambda turn: ("auto", "required")[turn % 2])

    async def _grow(self, turns: int, max_tokens: int, choice: Callable[[int], Any]) -> None:
        """Each turn finds all full blocks of the one before it, prompt and answer, in the cache."""
        fields: Any = {
            "model": self.model,
            "tools": [WEATHER, TIME],
            "parallel_tool_calls": False,
            "prompt_cache_key": secrets.token_hex(4),
        }
        messages: list[Any] = [{"role": "system", "content": f"You are {secrets.token_hex(8)}."}]
        before = 0
        for turn in range(turns):
            messages.append({"role": "user", "content": f"Question {turn}: what is {turn} plus {turn}?"})
            answer = await self.client.chat.completions.create(
                messages=messages, tool_choice=choice(turn), max_tokens=max_tokens, **fields
            )
            assert answer.usage and answer.usage.prompt_tokens_details
            found = answer.usage.prompt_tokens_details.cached_tokens or 0
            # A token's KV is computed when the next one is: the last of an answer never was.
            assert turn == 0 or found >= (before - 1) // self.block * self.block, (turn, found, before)
            before = answer.usage.prompt_tokens + answer.usage.completion_tokens
            message = answer.choices[0].message
            messages.append(message)
            for call in message.tool_calls or []:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "unknown"})

    async def shuffled_tools(self) -> None:
        """The order of keys in a tool changes no token."""
        fields: Any = {"model": self.model, "max_tokens": 1, "prompt_cache_key": secrets.token_hex(4)}
        messages: Any = [{"role": "system", "content": secrets.token_hex(8)}, *HELLO]
        await self._usage(messages, tools=[WEATHER, TIME], **fields)
        usage = await self._usage(messages, tools=[_reversed(WEATHER), TIME], **fields)
        found = usage.prompt_tokens_details.cached_tokens
        assert found == (usage.prompt_tokens - 1) // self.block * self.block

    async def _usage(self, messages: Any, **fields: Any) -> Any:
        answer = await self.client.chat.completions.create(messages=messages, **fields)
        assert answer.usage is not None
        return answer.usage


def _reversed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _reversed(held) for key, held in reversed(value.items())}


ANYWHERE = (
    Tour.chat,
    Tour.completion,
    Tour.three_choices,
    Tour.stops,
    Tour.logprobs,
    Tour.cache_usage,
    Tour.kept_prompt,
    Tour.prompt_cache,
    Tour.ignored,
    Tour.errors,
    Tour.tokens,
    Tour.shuffled_tools,
    Tour.growing_chat,
)
"""What a server can show whatever its model writes."""
WITH_A_MODEL = (Tour.penalties, Tour.structured, Tour.tools, Tour.calling_chat)
"""What takes workers that compute."""
