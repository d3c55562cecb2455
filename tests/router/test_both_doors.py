"""One request by every way in: the same text, tokens, log-probabilities and ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from open_doors import OpenDoors, open_doors

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts.embedded_redis import EmbeddedRedis

MESSAGES: Any = [{"role": "user", "content": "Draw a bird \N{BIRD} for me"}]
REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass
class Choice:
    """What every way in must agree on."""

    text: str = ""
    reason: str = ""
    logprobs: list[float] = field(default_factory=list)
    top: list[list[float]] = field(default_factory=list)


def chat() -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(**message) for message in MESSAGES])


async def by_grpc(doors: OpenDoors, **fields: Any) -> tuple[list[Choice], list[list[int]], pb.Usage]:
    """The choices, their token ids, and the usage of the last end."""
    request = pb.GenerateRequest(**fields)
    choices, ids = [Choice() for _ in range(request.n or 1)], [list[int]() for _ in range(request.n or 1)]
    usage: list[pb.Usage] = []
    async for response in doors.grpc.Generate(request):
        delta, finished = response.delta, response.finished
        if response.HasField("delta"):
            choices[delta.choice].text += delta.text
            ids[delta.choice].extend(delta.token_ids)
            # This model makes up numbers that OpenAI's dialect bounds.
            choices[delta.choice].logprobs.extend(max(p.logprob, -9999.0) for p in delta.logprobs)
            choices[delta.choice].top.extend([t.logprob for t in p.top] for p in delta.logprobs)
        elif response.HasField("finished"):
            choices[finished.choice].reason = REASONS[finished.reason]
            usage.extend([finished.usage] if finished.HasField("usage") else [])
    (last,) = usage
    return choices, ids, last


async def by_stream(doors: OpenDoors, **fields: Any) -> tuple[list[Choice], list[bytes], Any]:
    """The choices, the bytes of all their tokens, and the usage."""
    options = {"include_usage": True}
    stream = await doors.openai.chat.completions.create(
        model="", messages=MESSAGES, stream=True, stream_options=options, **fields
    )
    count = fields.get("n", 1)
    choices, data, usage = [Choice() for _ in range(count)], [b""] * count, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for news in chunk.choices:
            choice = choices[news.index]
            choice.text += news.delta.content or ""
            choice.reason = news.finish_reason or choice.reason
            for entry in (news.logprobs.content or []) if news.logprobs else []:
                choice.logprobs.append(entry.logprob)
                choice.top.append([top.logprob for top in entry.top_logprobs])
                data[news.index] += bytes(entry.bytes or [])
    return choices, data, usage


async def whole(doors: OpenDoors, **fields: Any) -> tuple[list[Choice], Any]:
    answer = await doors.openai.chat.completions.create(model="", messages=MESSAGES, **fields)
    choices = []
    for choice in answer.choices:
        entries = (choice.logprobs.content or []) if choice.logprobs else []
        choices.append(
            Choice(
                choice.message.content or "",
                choice.finish_reason,
                [entry.logprob for entry in entries],
                [[top.logprob for top in entry.top_logprobs] for entry in entries],
            )
        )
    return choices, answer.usage


@pytest.mark.parametrize("max_drafts", [0, 3])
async def test_every_way_in_gives_the_same_choices(
    redis_server: EmbeddedRedis, demo_gguf: Path, max_drafts: int
) -> None:
    """A stop string in mid-run, a choice that runs to its length, characters of several tokens."""
    async with open_doors(redis_server.url, demo_gguf, max_drafts=max_drafts) as doors:
        plain, ids, _ = await by_grpc(doors, chat=chat(), n=3, sampling=pb.SamplingParams(max_tokens=30))
        stop = plain[1].text[8:13]
        sampling = pb.SamplingParams(max_tokens=30, stop=[stop], logprobs=5, min_tokens=3)
        expected, ids, usage = await by_grpc(doors, chat=chat(), n=3, sampling=sampling)
        prompt = list((await doors.grpc.Tokenize(pb.TokenizeRequest(chat=chat()))).token_ids)
        same = await by_grpc(doors, token_ids=pb.TokenIds(ids=prompt), n=3, sampling=sampling)
        assert (same[0], same[1]) == (expected, ids)
        fields = {
            "n": 3,
            "max_tokens": 30,
            "stop": [stop],
            "logprobs": True,
            "top_logprobs": 5,
            "temperature": 0,
            "extra_body": {"min_tokens": 3},
        }
        streamed, data, stream_usage = await by_stream(doors, **fields)
        collected, whole_usage = await whole(doors, **fields)
        assert streamed == collected == expected
        assert "stop" in [choice.reason for choice in expected] and stop not in expected[1].text
        for choice, tokens in zip(expected, ids, strict=True):
            assert len(choice.logprobs) == len(tokens)
            assert all(len(top) == 5 and top == sorted(top, reverse=True) for top in choice.top)
        for choice, tokens in zip(streamed, data, strict=True):
            assert tokens.decode(errors="replace").startswith(choice.text.rstrip("\ufffd"))
        total = sum(map(len, ids))
        for counted in (usage, stream_usage, whole_usage):
            assert (counted.prompt_tokens, counted.completion_tokens) == (len(prompt), total)
        assert (usage.drafted_tokens > 0) == (max_drafts > 0)


async def test_special_and_broken_tokens_have_their_own_entries(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with open_doors(redis_server.url, demo_gguf) as doors:
        answer = await doors.openai.chat.completions.create(
            model="", messages=MESSAGES, max_tokens=60, logprobs=True, top_logprobs=20, temperature=0
        )
        (choice,) = answer.choices
        assert choice.logprobs is not None and choice.logprobs.content is not None
        for entry in choice.logprobs.content:
            assert entry.token and len({top.token for top in entry.top_logprobs}) == 20
        data = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
        assert data.decode(errors="replace") == choice.message.content


async def test_prompt_log_probabilities_are_for_grpc_alone(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with open_doors(redis_server.url, demo_gguf) as doors:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=range(50)), sampling=pb.SamplingParams(max_tokens=2, prompt_logprobs=0)
        )
        deltas = [r.delta async for r in doors.grpc.Generate(request) if r.HasField("delta")]
        assert sum(len(delta.prompt_logprobs) for delta in deltas) == 49
        assert not any(p.top for delta in deltas for p in delta.prompt_logprobs)
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
            await whole(doors, extra_body={"prompt_logprobs": 1})


LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n: must be between 1 and 16, is 0"),
    ({"n": 17}, "n: must be between 1 and 16, is 17"),
    ({"priority": 11}, "priority: must be between -10 and 10, is 11"),
    ({"sampling": pb.SamplingParams(logprobs=10**6)}, "logprobs: must be between 0 and 20, is 1000000"),
    ({"sampling": pb.SamplingParams(logprobs=-1)}, "logprobs: must be between 0 and 20, is -1"),
    ({"sampling": pb.SamplingParams(repetition_penalty=0)}, "repetition_penalty: must be above 0"),
    (
        {"sampling": pb.SamplingParams(frequency_penalty=float("nan"))},
        "frequency_penalty: must be between",
    ),
    ({"sampling": pb.SamplingParams(logit_bias={2**32 - 1: 1})}, "logit_bias: token ids must be between"),
    ({"sampling": pb.SamplingParams(max_tokens=1, min_tokens=2)}, "min_tokens: must be between 0 and 1"),
]


async def test_limits_are_named_over_grpc(redis_server: EmbeddedRedis, demo_gguf: Path) -> None:
    """A zero that was sent is not a field that was left out."""
    async with open_doors(redis_server.url, demo_gguf, count=1) as doors:
        for fields, message in LIMITS:
            with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
                await by_grpc(doors, text="x", **fields)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_of_many_choices_is_counted_once(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with open_doors(redis_server.url, demo_gguf, max_drafts=2) as doors:
        _, ids, usage = await by_grpc(doors, chat=chat(), n=4, sampling=pb.SamplingParams(max_tokens=10))

        def value(name: str, **labels: str) -> float | None:
            return doors.registry.get_sample_value(f"kvhive_{name}_total", labels)

        worker = {"worker": usage.worker_id}
        assert value("requests_started", **worker) == 1
        assert value("requests_finished", **worker, reason="length") == 1
        assert value("tokens", kind="completion") == sum(map(len, ids)) == 40
        assert value("tokens", kind="prompt") == usage.prompt_tokens
        assert value("tokens", kind="drafted") == usage.drafted_tokens > 0
        assert value("tokens", kind="accepted") == usage.accepted_tokens > 0
        assert doors.registry.get_sample_value("kvhive_ttft_seconds_count", {"cache": "miss"}) == 1
