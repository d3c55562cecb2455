"""Checks every request at the worker's own door, whoever sent it, and makes sequences of it."""

from __future__ import annotations

import math
from collections.abc import Sequence as ReadOnly

from kvhive.proto.block_hash import namespace_extras, unpack_tokens
from kvhive.proto.errors import InvalidRequest
from kvhive.proto.grammar import GRAMMAR_KINDS, MAX_GRAMMAR_BYTES
from kvhive.proto.json_schema import FIELD
from kvhive.proto.limits import (
    MAX_CACHE_NAME_CHARS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_PIN_TTL_S,
    MAX_PINS,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_REQUEST_ID_CHARS,
    MAX_TEMPERATURE,
    MAX_TENANT_CHARS,
)
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.model_runner import ModelShape
from kvhive.worker.sequence import BlockSource, Grammar, Pin, SamplingParams, Sequence

_ABOVE_ZERO = math.ulp(0.0)
MAX_ADDRESS_CHARS = 300
"""A host name has at most 253."""


def to_sequences(request: worker_pb2.WorkerGenerateRequest, shape: ModelShape) -> list[Sequence]:
    """Build one sequence per choice from a wire request, the first one leading.

    Its request_id is `{request_id}/{choice}` (`choice_of` reads it). The others wait for the first one's
    prompt, and leave pins, the source and the prompt's log-probabilities to it.
    Raises InvalidRequest naming field, limit and value.
    """
    tokens = _tokens(request, shape)
    _check_request(request, len(tokens))
    wire, resumed = request.sampling, request.resumed_tokens
    pins = tuple(_pin(i, pin, len(tokens) - resumed) for i, pin in enumerate(request.pins))
    source = _source(request)
    _check_sampling(wire, len(tokens), resumed, shape)
    sequences: list[Sequence] = []
    for choice in range(request.first_choice, request.first_choice + request.n):
        parent = sequences[0] if sequences else None
        sequences.append(
            Sequence(
                request_id=f"{request.request_id}/{choice}",
                tokens=list(tokens),
                prompt_tokens=len(tokens) - resumed,
                sampling=_sampling(wire, choice, with_prompt=parent is None),
                priority=request.priority,
                tenant=request.tenant,
                moved=request.moved,
                after=parent,
                pins=() if parent else pins,
                source=None if parent else source,
                extras=namespace_extras(request.cache_salt),
            )
        )
    return sequences


def choice_of(sequence_id: str) -> tuple[str, int]:
    """Return the request and the choice that a sequence's request_id names."""
    request_id, _, choice = sequence_id.rpartition("/")
    return request_id, int(choice)


def _check_request(request: worker_pb2.WorkerGenerateRequest, length: int) -> None:
    if not 1 <= len(request.request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            "request_id", f"must have 1 to {MAX_REQUEST_ID_CHARS} characters, has {len(request.request_id)}"
        )
    _at_most("cache_salt", len(request.cache_salt), MAX_CACHE_NAME_CHARS, "characters")
    _at_most("tenant", len(request.tenant), MAX_TENANT_CHARS, "characters")
    _at_most("pins", len(request.pins), MAX_PINS, "entries")
    _within("n", request.n, 1, MAX_CHOICES)
    _within("first_choice", request.first_choice, 0, MAX_CHOICES - request.n)
    _within("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.resumed_tokens >= length:
        raise InvalidRequest(
            "resumed_tokens", f"must be below the {length} token ids, is {request.resumed_tokens}"
        )
    if request.resumed_tokens and request.n > 1:
        raise InvalidRequest("n", f"must be 1 where one choice is resumed, is {request.n}")


def _tokens(request: worker_pb2.WorkerGenerateRequest, shape: ModelShape) -> list[int]:
    if len(request.token_ids) % 4:
        raise InvalidRequest("token_ids", f"{len(request.token_ids)} bytes is not a multiple of 4")
    tokens = unpack_tokens(request.token_ids)
    if not tokens:
        raise InvalidRequest("token_ids", "must not be empty")
    _in_vocabulary("token_ids", tokens, shape)
    return tokens


def _check_sampling(wire: worker_pb2.WorkerSampling, length: int, resumed: int, shape: ModelShape) -> None:
    if wire.max_tokens < 1:
        raise InvalidRequest("max_tokens", f"must be at least 1, is {wire.max_tokens}")
    if length + wire.max_tokens > shape.max_context:
        raise InvalidRequest(
            "max_tokens",
            f"prompt ({length} tokens) and max_tokens ({wire.max_tokens}) may not exceed the model's context "
            f"of {shape.max_context}, are {length + wire.max_tokens}",
        )
    _within("temperature", wire.temperature, 0.0, MAX_TEMPERATURE)
    _within("top_p", wire.top_p, _ABOVE_ZERO, 1.0)
    _within("min_p", wire.min_p, 0.0, 1.0)
    _within("typical_p", wire.typical_p, _ABOVE_ZERO, 1.0)
    _within("repetition_penalty", wire.repetition_penalty, _ABOVE_ZERO, MAX_REPETITION_PENALTY)
    _within("frequency_penalty", wire.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("presence_penalty", wire.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    # max_tokens is what is still to come; min_tokens counts what an earlier worker has done, too.
    _within("min_tokens", wire.min_tokens, 0, resumed + wire.max_tokens)
    _within("logprobs", wire.logprobs, 0, MAX_LOGPROBS)
    _within("prompt_logprobs", wire.prompt_logprobs, 0, MAX_LOGPROBS)
    _in_vocabulary("stop_token_ids", wire.stop_token_ids, shape)
    _at_most("logit_bias", len(wire.logit_bias), MAX_LOGIT_BIAS_ENTRIES, "entries")
    _in_vocabulary("logit_bias", sorted(wire.logit_bias), shape)
    for token_id, bias in wire.logit_bias.items():
        _within(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    if wire.HasField("grammar") and wire.grammar.kind not in GRAMMAR_KINDS:
        raise InvalidRequest(
            FIELD, f"must be one of {', '.join(GRAMMAR_KINDS)}, is {wire.grammar.kind[:40]!r}"
        )
    _at_most(FIELD, len(wire.grammar.text.encode()), MAX_GRAMMAR_BYTES, "bytes")


def _sampling(wire: worker_pb2.WorkerSampling, choice: int, with_prompt: bool) -> SamplingParams:
    asks_prompt = with_prompt and wire.HasField("prompt_logprobs")
    return SamplingParams(
        max_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        typical_p=wire.typical_p,
        repetition_penalty=wire.repetition_penalty,
        frequency_penalty=wire.frequency_penalty,
        presence_penalty=wire.presence_penalty,
        logit_bias=tuple(sorted(wire.logit_bias.items())),
        seed=wire.seed,
        choice=choice,
        min_tokens=wire.min_tokens,
        stop_token_ids=frozenset(wire.stop_token_ids),
        logprobs=wire.logprobs if wire.HasField("logprobs") else None,
        prompt_logprobs=wire.prompt_logprobs if asks_prompt else None,
        speculate=wire.speculate,
        grammar=Grammar(wire.grammar.kind, wire.grammar.text) if wire.HasField("grammar") else None,
    )


def _pin(index: int, pin: worker_pb2.WorkerPin, prompt_tokens: int) -> Pin:
    _within(f"pins[{index}].tokens", pin.tokens, 1, prompt_tokens)
    _within(f"pins[{index}].ttl_s", pin.ttl_s, 0.0, MAX_PIN_TTL_S)
    return Pin(pin.tokens, pin.ttl_s)


def _source(request: worker_pb2.WorkerGenerateRequest) -> BlockSource | None:
    wire = request.source
    if not request.HasField("source") or not wire.blocks:
        return None
    _at_most("source.worker_id", len(wire.worker_id), MAX_REQUEST_ID_CHARS, "characters")
    _at_most("source.address", len(wire.address), MAX_ADDRESS_CHARS, "characters")
    return BlockSource(wire.worker_id, wire.address, wire.epoch, wire.blocks)


def _in_vocabulary(field: str, token_ids: ReadOnly[int], shape: ModelShape) -> None:
    if token_ids and max(token_ids) >= shape.vocab_size:
        index = next(i for i, token in enumerate(token_ids) if token >= shape.vocab_size)
        raise InvalidRequest(
            field, f"must be below the vocabulary size {shape.vocab_size}, is {token_ids[index]} at {index}"
        )


def _at_most(field: str, size: int, limit: int, what: str) -> None:
    if size > limit:
        raise InvalidRequest(field, f"must have at most {limit} {what}, has {size}")


def _within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise InvalidRequest(field, f"must be between {low:g} and {high:g}, is {value:g}")
