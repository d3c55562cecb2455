"""The fields that the bodies of both of OpenAI's completion endpoints share, read strictly.

Strict: "5" is not a number, and a field that would change the answer but is not supported is refused by
name, never ignored (`field_policy`). Limits are checked behind this door, by `validate_request`, as for gRPC.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.field_checks import spell_text
from kvhive.router.http_body import json_type
from kvhive.router.http_headers import CACHE_KEY_HEADER
from kvhive.router.json_fields import number, typed
from kvhive.router.openai.field_policy import IGNORED_STREAM_OPTIONS, GivenFields, spell_name
from kvhive.router.openai.output_format import read_grammar
from kvhive.router.request import GenerateRequest, Prompt
from kvhive.router.sampling_params import SamplingParams

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default, so that its clients find what they know; over gRPC the default is 0."""

SPELLINGS = {"cache_key": "prompt_cache_key", "request_id": "x-request-id", "tenant": "user"}
"""What fields of the internal request are called in both bodies, where that is something else."""
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One parsed body: the internal requests, one per prompt, and how the answer is to be shaped."""

    requests: tuple[GenerateRequest, ...]
    """All with the same options; the choices of the first come first."""
    stream: bool
    include_usage: bool
    echo: bool = False
    """Whether each choice begins with its prompt."""
    spell: Callable[[int, str], str] = field(default=lambda prompt, name: name, compare=False)
    """(which prompt, a field of the internal request) -> what this body calls it."""
    prewarm: bool = False
    """Whether the prompts are only to be cached; the answers are empty."""
    ignored: tuple[str, ...] = ()
    """Fields that changed nothing."""

    @property
    def request(self) -> GenerateRequest:
        """The first, or only, request: what the others share is read from it."""
        return self.requests[0]


def generate_request(
    given: Mapping[str, Any], prompt: Prompt, sampling: SamplingParams, request_id: str
) -> GenerateRequest:
    """Return the internal request for one prompt. Raises InvalidRequest."""
    return GenerateRequest(
        prompt=prompt,
        sampling=sampling,
        model=typed(given, "model", str, ""),
        cache_salt=typed(given, "cache_salt", str, ""),
        cache_key=typed(given, "prompt_cache_key", str, ""),
        request_id=request_id,
        n=typed(given, "n", int, 1),
        priority=typed(given, "priority", int, 0),
        tenant=typed(given, "user", str, "") or typed(given, "safety_identifier", str, ""),
    )


def with_cache_key(asked: CompletionRequest, key: str) -> CompletionRequest:
    """Return it with the cache_key of its headers, where there is one and the body names none."""
    if not key or asked.request.cache_key:
        return asked
    return replace(
        asked,
        requests=tuple(replace(request, cache_key=key) for request in asked.requests),
        spell=lambda prompt, name: CACHE_KEY_HEADER if name == "cache_key" else asked.spell(prompt, name),
    )


def sampling_fields(given: Mapping[str, Any], max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Return the options; the two that the endpoints spell differently are given. Raises InvalidRequest."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=number(given, "temperature", DEFAULT_TEMPERATURE),
        top_k=typed(given, "top_k", int, 0),
        top_p=number(given, "top_p", 1.0),
        min_p=number(given, "min_p", 0.0),
        seed=typed(given, "seed", int, None),
        stop=_stops(given),
        stop_token_ids=_items(given, "stop_token_ids", int),
        ignore_eos=typed(given, "ignore_eos", bool, False),
        typical_p=number(given, "typical_p", 1.0),
        repetition_penalty=number(given, "repetition_penalty", 1.0),
        frequency_penalty=number(given, "frequency_penalty", 0.0),
        presence_penalty=number(given, "presence_penalty", 0.0),
        logit_bias=_logit_bias(given),
        min_tokens=typed(given, "min_tokens", int, 0),
        logprobs=logprobs,
        grammar=read_grammar(given),
    )


def stream_fields(given: GivenFields) -> tuple[bool, bool]:
    """Return (whether to stream, whether the stream ends with its usage). Raises InvalidRequest."""
    stream = bool(typed(given, "stream", bool, False))
    options: dict[str, Any] = typed(given, "stream_options", dict, {})
    if options and not stream:
        raise InvalidRequest("stream_options", "is only allowed with stream: true")
    for name in options:
        if name in IGNORED_STREAM_OPTIONS:
            given.ignore(f"stream_options.{name}")
        elif name != "include_usage":
            raise InvalidRequest(f"stream_options.{spell_name(name)}", "is not supported")
    value = options.get("include_usage")
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest("stream_options.include_usage", f"must be a boolean, is {json_type(value)}")
    return stream, bool(value)


def _stops(given: Mapping[str, Any]) -> tuple[str, ...]:
    if isinstance(given.get("stop"), str):
        return (given["stop"],)
    return _items(given, "stop", str)


def _items(given: Mapping[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    values: list[Any] = typed(given, name, list, [])
    for index, value in enumerate(values):
        typed({f"{name}[{index}]": value}, f"{name}[{index}]", kind, None)
    return tuple(values)


def _logit_bias(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    entries: dict[str, Any] = typed(given, "logit_bias", dict, {})
    for key, bias in entries.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest("logit_bias", f"keys must be token ids, one is {spell_text(key)}")
        number({f"logit_bias[{key}]": bias}, f"logit_bias[{key}]", 0.0)
    return tuple(sorted((int(key), bias) for key, bias in entries.items()))
