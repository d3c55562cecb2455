"""The fields that the bodies of both of OpenAI's completion endpoints share, read strictly.

Strict: "5" is not a number, and a field that would change the answer but is not supported is refused by
name, never ignored. What a caller's SDK sends without consequence here is listed and ignored. Limits are
checked behind this door, by `validate_request`, as for gRPC.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.field_checks import spell_text
from kvhive.router.http_body import json_type
from kvhive.router.http_headers import CACHE_KEY_HEADER
from kvhive.router.json_fields import number, typed
from kvhive.router.request import GenerateRequest, Prompt
from kvhive.router.sampling_params import SamplingParams

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default, so that its clients find what they know; over gRPC the default is 0."""

_SHARED = {
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "cache_salt",
    "prompt_cache_key",
    "n",
    "logprobs",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "typical_p",
    "min_tokens",
    "priority",
    "user",
    "safety_identifier",
}
_IGNORED = {"metadata", "store", "service_tier", "prompt_cache_retention"}
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
    spell: Callable[[int, str], str] = lambda prompt, field: field
    """(which prompt, a field of the internal request) -> what this body calls it."""

    @property
    def request(self) -> GenerateRequest:
        """The first, or only, request: what the others share is read from it."""
        return self.requests[0]


def given_fields(
    body: Mapping[str, Any], supported: set[str], neutral: Mapping[str, tuple[object, ...]]
) -> dict[str, Any]:
    """Return the fields that are not null. Raises InvalidRequest for one that is not supported.

    `supported` adds to the fields that both endpoints have. A field of `neutral` may have those values alone:
    they ask for nothing.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in _SHARED or name in supported or name in _IGNORED:
            continue
        if name not in neutral:
            raise InvalidRequest(ascii(name[:64])[1:-1], "is not supported")
        # A boolean equals a number in Python but not in JSON.
        if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral[name]):
            only = " or ".join(repr(n) for n in neutral[name])
            raise InvalidRequest(name, f"is not supported, other than {only}")
    return given


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
        spell=lambda prompt, field: CACHE_KEY_HEADER if field == "cache_key" else asked.spell(prompt, field),
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
    )


def stream_fields(given: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return (whether to stream, whether the stream ends with its usage). Raises InvalidRequest."""
    stream = bool(typed(given, "stream", bool, False))
    options: dict[str, Any] = typed(given, "stream_options", dict, {})
    if options and not stream:
        raise InvalidRequest("stream_options", "is only allowed with stream: true")
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
