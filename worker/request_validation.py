"""Checks every request at the worker's own door, whoever sent it."""

from __future__ import annotations

import math

from kvhive.proto.block_hash import namespace_extras, unpack_tokens
from kvhive.proto.errors import InvalidRequest
from kvhive.proto.limits import MAX_CACHE_NAME_CHARS, MAX_REQUEST_ID_CHARS, MAX_TEMPERATURE
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.model_runner import ModelShape
from kvhive.worker.sequence import SamplingParams, Sequence


def to_sequence(request: worker_pb2.WorkerGenerateRequest, shape: ModelShape) -> Sequence:
    """Build a sequence from a wire request. Raises InvalidRequest naming field, limit and value."""
    if not 1 <= len(request.request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            "request_id", f"must have 1 to {MAX_REQUEST_ID_CHARS} characters, has {len(request.request_id)}"
        )
    if len(request.cache_salt) > MAX_CACHE_NAME_CHARS:
        raise InvalidRequest(
            "cache_salt",
            f"must have at most {MAX_CACHE_NAME_CHARS} characters, has {len(request.cache_salt)}",
        )
    tokens = _tokens(request, shape)
    if not 0 <= request.resumed_tokens < len(tokens):
        raise InvalidRequest(
            "resumed_tokens", f"must be below the {len(tokens)} token ids, is {request.resumed_tokens}"
        )
    return Sequence(
        request_id=request.request_id,
        tokens=tokens,
        prompt_tokens=len(tokens) - request.resumed_tokens,
        sampling=_sampling(request.sampling, len(tokens), shape),
        extras=namespace_extras(request.cache_salt),
    )


def _tokens(request: worker_pb2.WorkerGenerateRequest, shape: ModelShape) -> list[int]:
    if len(request.token_ids) % 4:
        raise InvalidRequest("token_ids", f"{len(request.token_ids)} bytes is not a multiple of 4")
    tokens = unpack_tokens(request.token_ids)
    if not tokens:
        raise InvalidRequest("token_ids", "must not be empty")
    if max(tokens) >= shape.vocab_size:
        index = next(i for i, token in enumerate(tokens) if token >= shape.vocab_size)
        raise InvalidRequest(
            "token_ids",
            f"must be below the vocabulary size {shape.vocab_size}, is {tokens[index]} at {index}",
        )
    return tokens


def _sampling(wire: worker_pb2.WorkerSampling, length: int, shape: ModelShape) -> SamplingParams:
    if wire.max_tokens < 1:
        raise InvalidRequest("max_tokens", f"must be at least 1, is {wire.max_tokens}")
    if length + wire.max_tokens > shape.max_context:
        raise InvalidRequest(
            "max_tokens",
            f"prompt ({length} tokens) and max_tokens ({wire.max_tokens}) may not exceed the model's context "
            f"of {shape.max_context}, are {length + wire.max_tokens}",
        )
    _within("temperature", wire.temperature, 0.0, MAX_TEMPERATURE)
    _within("top_p", wire.top_p, math.ulp(0.0), 1.0)
    _within("min_p", wire.min_p, 0.0, 1.0)
    return SamplingParams(
        max_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        seed=wire.seed,
        stop_token_ids=frozenset(wire.stop_token_ids),
    )


def _within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise InvalidRequest(field, f"must be between {low:g} and {high:g}, is {value:g}")
