"""What both doors advertise as limits they enforce, at once; and slow readers cost little."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from open_doors import OpenDoors, open_doors
from redis_fixtures import eventually
from router_rig import CONTEXT

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts.embedded_redis import EmbeddedRedis

PAGE = os.sysconf("SC_PAGE_SIZE")
POOL_BLOCKS = CONTEXT // 4 + 64
HI: Any = [{"role": "user", "content": "hi"}]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


async def by_grpc(doors: OpenDoors, ids: list[int], **sampling: Any) -> tuple[int, int]:
    """Return how many tokens came, and why the output ended."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(ignore_eos=True, **sampling)
    )
    count, reason = 0, 0
    async for response in doors.grpc.Generate(request):
        count += len(response.delta.token_ids)
        reason = response.finished.reason or reason
    return count, reason


async def message_of(doors: OpenDoors, tokens: int) -> list[dict[str, str]]:
    """A chat of exactly so many prompt tokens."""
    empty = pb.Chat(messages=[pb.ChatMessage(role="user", content="")])
    around = len((await doors.grpc.Tokenize(pb.TokenizeRequest(chat=empty))).token_ids)
    return [{"role": "user", "content": " hello" * (tokens - around)}]


def http_client(doors: OpenDoors) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=str(doors.openai.base_url), timeout=20)


async def test_a_prompt_may_leave_room_for_one_token_and_no_less(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """One below the advertised limit is served; at it and above it is a 400 with both numbers."""
    async with open_doors(redis_server.url, demo_gguf, count=1, blocks=POOL_BLOCKS) as doors:
        (model,) = (await doors.grpc.ListModels(pb.ListModelsRequest())).models
        async with http_client(doors) as http:
            listed = (await http.get("models")).json()["data"][0]["max_model_len"]
            assert listed == model.max_context == CONTEXT
            ids = [7] * (CONTEXT - 1)
            assert await by_grpc(doors, ids) == (1, pb.FINISH_REASON_LENGTH)
            assert await by_grpc(doors, ids, max_tokens=1) == (1, pb.FINISH_REASON_LENGTH)
            body: Any = {"messages": await message_of(doors, CONTEXT - 1), "ignore_eos": True}
            answer = (await http.post("chat/completions", json=body)).json()
            assert answer["usage"]["prompt_tokens"] == CONTEXT - 1
            assert answer["usage"]["completion_tokens"] == 1
            assert answer["choices"][0]["finish_reason"] == "length"
            for length in (CONTEXT, CONTEXT + 1, 3 * CONTEXT):
                words = f"at most {CONTEXT - 1} tokens.*; has {length}"
                for sampling in ({}, {"max_tokens": 1}):
                    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                        await by_grpc(doors, [7] * length, **sampling)
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                body = {"messages": await message_of(doors, length), "stream": length % 2 == 0}
                began = time.monotonic()
                response = await http.post("chat/completions", json=body)
                assert response.status_code == 400 and time.monotonic() - began < 1
                assert f"at most {CONTEXT - 1} tokens" in response.json()["error"]["message"]
                assert f"has {length}" in response.json()["error"]["message"]
        await doors.rig.idle()


@pytest.mark.parametrize("length", [20, CONTEXT - 5])
async def test_max_tokens_is_clear_at_every_size_of_prompt(
    redis_server: EmbeddedRedis, demo_gguf: Path, length: int
) -> None:
    """Never an empty answer nor a negative limit in a message; without it the answer fills the room."""
    async with open_doors(redis_server.url, demo_gguf, count=1, blocks=POOL_BLOCKS) as doors:
        room, messages = CONTEXT - length, await message_of(doors, length)
        async with http_client(doors) as http:
            for asked in (0, -1, room + 1, 10**9, "5"):
                body = {"messages": messages, "max_tokens": asked}
                response = await http.post("chat/completions", json=body)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, "max_tokens")
                assert "between 1 and" in error["message"] or "must be an integer" in error["message"]
            for asked in (1, 5, *([room, None] if room < 100 else [])):
                body = {"messages": messages, "max_tokens": asked, "ignore_eos": True}
                answer = (await http.post("chat/completions", json=body)).json()
                assert answer["usage"]["completion_tokens"] == (asked or room)
                assert answer["choices"][0]["finish_reason"] == "length"


async def test_what_would_take_memory_without_end_is_refused_at_once(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    huge: list[dict[str, Any]] = [
        {"logprobs": True, "top_logprobs": 10**6},
        {"logprobs": True, "top_logprobs": -1},
        {"top_logprobs": 10**4},
        {"prompt_logprobs": 10**6},
        {"n": 10**6},
        {"best_of": 10**6},
        {"stop": ["x"] * 10**5},
        {"logit_bias": dict.fromkeys(map(str, range(40_000)), 1)},
    ]
    async with open_doors(redis_server.url, demo_gguf, count=1) as doors, http_client(doors) as http:
        before = resident_bytes()
        for fields in huge:
            began = time.monotonic()
            response = await http.post("chat/completions", json={"messages": HI, **fields})
            assert response.status_code == 400, fields
            assert time.monotonic() - began < 1
        assert resident_bytes() - before < 64 << 20
        assert (
            await http.post("chat/completions", json={"messages": HI, "max_tokens": 1})
        ).status_code == 200


async def test_thirty_readers_that_do_not_read_cost_little_and_hold_nobody_up(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """By each door 15, 100 tokens with log-probabilities: others are served, and blocks come back."""
    async with open_doors(redis_server.url, demo_gguf, count=1, blocks=2048) as doors:
        before = resident_bytes()
        sampling = pb.SamplingParams(max_tokens=100, ignore_eos=True, logprobs=5)
        calls = [
            doors.grpc.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[i, 1]), sampling=sampling))
            for i in range(15)
        ]
        options: Any = {"model": "", "messages": HI, "stream": True, "logprobs": True, "top_logprobs": 5}
        options |= {"max_tokens": 100, "extra_body": {"ignore_eos": True}}
        streams = await asyncio.gather(*(doors.openai.chat.completions.create(**options) for _ in range(15)))
        worker = doors.rig.workers["w1"]
        await eventually(lambda: worker.engine.load.running == 8, 20)
        await eventually(lambda: worker.engine.load.blocks_live == worker.engine.load.waiting == 0, 60)
        async with asyncio.timeout(5):
            assert await by_grpc(doors, [5, 5], max_tokens=4) == (4, pb.FINISH_REASON_LENGTH)
        assert resident_bytes() - before < 64 << 20
        for call in calls:
            assert sum([len(response.delta.token_ids) async for response in call]) == 100
        choices = [chunk.choices[0] async for chunk in streams[0]]
        entries = [choice.logprobs.content or [] for choice in choices if choice.logprobs]
        assert sum(map(len, entries)) == 100 and choices[-1].finish_reason == "length"
        for stream in streams[1:]:
            await stream.close()
        await doors.rig.idle()
