"""Every limit of a request is enforced, and its message names the field, the limit and the value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.messages import ChatMessage, ChatPrompt, Tool, ToolCall
from kvhive.router.request import (
    GenerateRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_prompt_length,
    resolve_max_tokens,
    validate_request,
)
from kvhive.router.sampling_params import SamplingParams

VOCAB, CONTEXT = 1000, 8192


def check(prompt: Prompt | None = None, sampling: SamplingParams | None = None, **fields: Any) -> None:
    request = GenerateRequest(prompt or TextPrompt("hi"), sampling or SamplingParams(), **fields)
    validate_request(request, VOCAB, CONTEXT)


def test_good_requests_pass() -> None:
    check()
    check(TokenPrompt((0, VOCAB - 1)))
    check(TokenPrompt((1,) * (CONTEXT - 1)))
    check(ChatPrompt((ChatMessage("system", ""), ChatMessage("user", "é\x00😀"))))
    check(ChatPrompt((ChatMessage("user", "x"),) * 4096))
    check(sampling=SamplingParams(max_tokens=CONTEXT, temperature=100, top_k=2**31 - 1, top_p=1e-9, min_p=1))
    check(sampling=SamplingParams(seed=2**64 - 1, stop=("x" * 256,) * 16, stop_token_ids=(1,) * 64))
    extremes = SamplingParams(
        max_tokens=9,
        typical_p=1e-9,
        repetition_penalty=10,
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias=tuple((i % VOCAB, -100) for i in range(1000)),
        min_tokens=9,
        logprobs=20,
        prompt_logprobs=0,
    )
    check(sampling=extremes, n=16, priority=-10)
    check(cache_salt="s" * 256, cache_key="k" * 256, request_id="r" * 128, model="any")


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(max_tokens=0), "max_tokens: must be between 1 and 8192, is 0"),
        (SamplingParams(max_tokens=-1), "max_tokens: must be between 1 and 8192, is -1"),
        (SamplingParams(max_tokens=10_000), "max_tokens: must be between 1 and 8192, is 10000"),
        (
            SamplingParams(max_tokens=10**400),
            "max_tokens: must be between 1 and 8192, is an integer of 1329 bits",
        ),
        (SamplingParams(temperature=-0.5), "temperature: must be between 0 and 100, is -0.5"),
        (SamplingParams(temperature=101), "temperature: must be between 0 and 100, is 101"),
        (SamplingParams(temperature=math.nan), "temperature: must be between 0 and 100, is nan"),
        (SamplingParams(temperature=math.inf), "temperature: must be between 0 and 100, is inf"),
        (SamplingParams(top_p=math.nan), "top_p: must be between 0 and 1, is nan"),
        (SamplingParams(top_p=0), "top_p: must be above 0 and at most 1, is 0"),
        (SamplingParams(top_p=1.01), "top_p: must be between 0 and 1, is 1.01"),
        (SamplingParams(min_p=-math.inf), "min_p: must be between 0 and 1, is -inf"),
        (SamplingParams(top_k=-1), "top_k: must be between 0 and 2147483647, is -1"),
        (SamplingParams(typical_p=0), "typical_p: must be above 0 and at most 1, is 0"),
        (SamplingParams(typical_p=1.1), "typical_p: must be between 0 and 1, is 1.1"),
        (SamplingParams(repetition_penalty=0), "repetition_penalty: must be above 0 and at most 10, is 0"),
        (SamplingParams(repetition_penalty=math.inf), "repetition_penalty: must be between 0 and 10, is inf"),
        (SamplingParams(frequency_penalty=2.1), "frequency_penalty: must be between -2 and 2, is 2.1"),
        (SamplingParams(presence_penalty=math.nan), "presence_penalty: must be between -2 and 2, is nan"),
        (SamplingParams(5, min_tokens=6), "min_tokens: must be between 0 and 5, is 6"),
        (SamplingParams(min_tokens=-1), "min_tokens: must be between 0 and 8192, is -1"),
        (SamplingParams(logprobs=-1), "logprobs: must be between 0 and 20, is -1"),
        (SamplingParams(logprobs=10**6), "logprobs: must be between 0 and 20, is 1000000"),
        (SamplingParams(prompt_logprobs=21), "prompt_logprobs: must be between 0 and 20, is 21"),
        (SamplingParams(logit_bias=((1, 101),)), "logit_bias[1]: must be between -100 and 100, is 101"),
        (SamplingParams(logit_bias=((1, math.nan),)), "logit_bias[1]: must be between -100 and 100, is nan"),
        (
            SamplingParams(logit_bias=((0, 1), (1000, 1))),
            "logit_bias: token ids must be between 0 and 999, one is 1000",
        ),
        (
            SamplingParams(logit_bias=tuple((i, 1) for i in range(1025))),
            "logit_bias: must have at most 1024 entries, has 1025",
        ),
        (SamplingParams(seed=2**64), f"seed: must be between 0 and {2**64 - 1}, is {2**64}"),
        (SamplingParams(stop=("x",) * 17), "stop: must be at most 16 strings, is 17"),
        (SamplingParams(stop=("a", "")), "stop[1]: must be 1 to 256 characters, is empty"),
        (SamplingParams(stop=("x" * 257,)), "stop[0]: must be at most 256 characters, is 257"),
        (
            SamplingParams(stop=("\ud800",)),
            "stop[0]: must be valid Unicode, has the lone surrogate U+D800 at 0",
        ),
        (SamplingParams(stop_token_ids=(1,) * 65), "stop_token_ids: must be at most 64 ids, is 65"),
        (SamplingParams(stop_token_ids=(1, 1000)), "stop_token_ids[1]: must be between 0 and 999, is 1000"),
    ],
)
def test_sampling_limits(sampling: SamplingParams, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(sampling=sampling)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (TextPrompt(""), "text: must not be empty"),
        (TextPrompt("ab\udfff"), "text: must be valid Unicode, has the lone surrogate U+DFFF at 2"),
        (TokenPrompt(()), "token_ids: must not be empty"),
        (TokenPrompt((1, 1000, 2)), "token_ids[1]: must be between 0 and 999, is 1000"),
        (TokenPrompt((1, -5)), "token_ids[1]: must be between 0 and 999, is -5"),
        (ChatPrompt(()), "messages: must not be empty"),
        (
            ChatPrompt((ChatMessage("user", "x"),), (Tool("a", "", ""), Tool("b c", "", ""))),
            "tools[1].name: must be 1 to 128 letters, digits and any of _ . : / -, is 'b c'",
        ),
        (ChatPrompt((ChatMessage("user", "x"),) * 4097), "messages: must be at most 4096 messages, is 4097"),
        (
            ChatPrompt((ChatMessage("user", "x"), ChatMessage("owner", "x"))),
            "messages[1].role: must be one of system, user, assistant, tool, is 'owner'",
        ),
        (
            ChatPrompt(
                (
                    ChatMessage(
                        "assistant", "", (ToolCall("i" * 256, "f", "{}"), ToolCall("i" * 257, "f", "{}"))
                    ),
                )
            ),
            "messages[0].tool_calls[1].id: must be at most 256 characters, is 257",
        ),
        (
            ChatPrompt((ChatMessage("assistant", "", (ToolCall("i", "n" * 129, "{}"),)),)),
            "messages[0].tool_calls[0].name: must be at most 128 characters, is 129",
        ),
        (
            ChatPrompt((ChatMessage("tool", "", tool_call_id="i" * 257),)),
            "messages[0].tool_call_id: must be at most 256 characters, is 257",
        ),
        (
            ChatPrompt((ChatMessage("user", "\ud83d"),)),
            "messages[0].content: must be valid Unicode, has the lone surrogate U+D83D at 0",
        ),
    ],
)
def test_prompt_limits(prompt: Prompt, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(prompt)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cache_salt": "s" * 257}, "cache_salt"),
        ({"cache_salt": "\udc00"}, "cache_salt"),
        ({"cache_key": "k" * 257}, "cache_key"),
        ({"request_id": "r" * 129}, "request_id"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "a\n"}, "request_id"),
        ({"request_id": "é"}, "request_id"),
        ({"model": "\ud800"}, "model"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 10**6}, "n"),
        ({"priority": 11}, "priority"),
    ],
)
def test_request_limits(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**fields)
    assert caught.value.field == field
    str(caught.value).encode()


def test_a_prompt_must_leave_room_for_output() -> None:
    check_prompt_length("prompt", CONTEXT - 1, CONTEXT)
    for tokens in (CONTEXT, CONTEXT + 1, 3 * CONTEXT):
        with pytest.raises(InvalidRequest, match=f"8191 tokens.* context of 8192; has {tokens}"):
            check_prompt_length("prompt", tokens, CONTEXT)
    with pytest.raises(InvalidRequest, match="at least 1 token"):
        check_prompt_length("prompt", 0, CONTEXT)


def test_max_tokens_is_what_the_context_leaves() -> None:
    def resolve(prompt_tokens: int, max_tokens: int | None, **fields: int) -> int:
        return resolve_max_tokens(prompt_tokens, SamplingParams(max_tokens, **fields), CONTEXT)

    assert resolve(20, None) == CONTEXT - 20
    assert resolve(CONTEXT - 1, None) == 1
    assert resolve(20, CONTEXT - 20) == CONTEXT - 20
    for asked in (0, -1, CONTEXT - 19, 10**9):
        with pytest.raises(InvalidRequest, match=r"between 1 and 8172 .*context of 8192 .*prompt's 20\), is"):
            resolve(20, asked)
    with pytest.raises(InvalidRequest, match="min_tokens: must be between 0 and 8172, is 8173"):
        resolve(20, None, min_tokens=8173)
