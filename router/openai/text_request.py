"""The body of POST /v1/completions, turned into one internal request per prompt."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.http_body import json_type
from kvhive.router.json_fields import typed
from kvhive.router.openai.field_policy import NEUTRAL_IN_TEXTS, OBEYED_IN_TEXTS, given_fields
from kvhive.router.openai.fields import (
    SPELLINGS,
    CompletionRequest,
    generate_request,
    sampling_fields,
    stream_fields,
)
from kvhive.router.openai.output_format import grammar_field
from kvhive.router.openai.prompt_cache import prompt_pins, read_cache_options
from kvhive.router.request import TextPrompt, TokenPrompt
from kvhive.router.sampling_params import Grammar, check_logprobs

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""
MAX_PROMPTS = 64
"""Prompts of one body: each is a request of its own to the cluster."""
MAX_SCORED_ANSWERS = 8
"""Answers of one body that repeat their prompt with log-probabilities: kilobytes for every prompt token."""


def parse_text_completion(body: dict[str, Any], request_id: str) -> CompletionRequest:
    """Read a parsed JSON body. Raises InvalidRequest naming the field, what it must be and what it is.

    With echo and logprobs, the prompt's own log-probabilities are asked for as well.
    """
    given = given_fields(body, OBEYED_IN_TEXTS, NEUTRAL_IN_TEXTS)
    stream, include_usage = stream_fields(given)
    echo = typed(given, "echo", bool, False)
    logprobs: int | None = typed(given, "logprobs", int, None)
    check_logprobs("logprobs", logprobs)
    sampling = sampling_fields(given, typed(given, "max_tokens", int, DEFAULT_MAX_TOKENS), logprobs)
    prompts, several = _prompts(given)
    if echo:
        sampling = replace(sampling, prompt_logprobs=logprobs)
    answers = len(prompts) * typed(given, "n", int, 1)
    if echo and logprobs is not None and answers > MAX_SCORED_ANSWERS:
        raise InvalidRequest(
            "prompt",
            f"with echo and logprobs must ask for at most {MAX_SCORED_ANSWERS} answers, asks for {answers}",
        )
    cache = read_cache_options(given)
    if echo and cache.prewarm:
        raise InvalidRequest(
            "prompt_cache_options.prewarm", "must not be given with echo: the answer is empty"
        )
    pins = prompt_pins(given, cache)
    return CompletionRequest(
        tuple(
            replace(generate_request(given, prompt, sampling, request_id), pins=pins) for prompt in prompts
        ),
        stream,
        include_usage,
        echo,
        functools.partial(_spelling, several, sampling.grammar),
        cache.prewarm,
        given.ignored,
    )


def _spelling(several: bool, grammar: Grammar | None, prompt: int, field: str) -> str:
    """Name a field of the internal request: `token_ids[3]` of the second prompt is `prompt[1][3]`."""
    name, bracket, index = field.partition("[")
    if name in ("prompt", "text", "token_ids"):
        return ("prompt" + f"[{prompt}]" * several) + bracket + index
    if field in ("grammar", "response_format"):
        return grammar_field(grammar)
    return SPELLINGS.get(field, field)


def _prompts(given: Mapping[str, Any]) -> tuple[list[TextPrompt | TokenPrompt], bool]:
    """Return the prompts, and whether they came as a list of prompts."""
    if "prompt" not in given:
        raise InvalidRequest("prompt", "is required")
    prompt = given["prompt"]
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and type(prompt[0]) is int):
        return [_prompt("prompt", prompt)], False
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt", f"must be a string or an array, is {json_type(prompt)}")
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise InvalidRequest("prompt", f"must be 1 to {MAX_PROMPTS} prompts, is {len(prompt)}")
    return [_prompt(f"prompt[{index}]", item) for index, item in enumerate(prompt)], True


def _prompt(where: str, prompt: object) -> TextPrompt | TokenPrompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if not isinstance(prompt, list):
        raise InvalidRequest(where, f"must be a string or an array of token ids, is {json_type(prompt)}")
    return TokenPrompt(token_ids(where, prompt))


def token_ids(where: str, items: list[Any]) -> tuple[int, ...]:
    """Return an array of token ids. Raises InvalidRequest naming the first item that is no integer."""
    # There may be thousands: the types are compared as one set, and the bad one sought only if needed.
    if set(map(type, items)) - {int}:
        index, bad = next((i, item) for i, item in enumerate(items) if type(item) is not int)
        raise InvalidRequest(f"{where}[{index}]", f"must be a token id, is {json_type(bad)}")
    return tuple(items)
