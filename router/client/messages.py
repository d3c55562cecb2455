"""A call's arguments as messages of kvhive.v1: keyword options have the names of the .proto's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar

from google.protobuf.message import Message

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.v1 import inference_pb2 as pb

Prompt: TypeAlias = str | Sequence[int] | pb.Chat
"""Plain text, token ids of the served model, or a conversation."""

Event: TypeAlias = pb.Started | pb.Delta | pb.Finished
"""What a stream brings: one Started, any number of Delta, one Finished for each choice."""

Made = TypeVar("Made", bound=Message)

_SAMPLING = frozenset(field.name for field in pb.SamplingParams.DESCRIPTOR.fields)


class Naming(TypedDict, total=False):
    """Whose request it is, and which cache it shares."""

    model: str
    cache_salt: str
    cache_key: str
    tenant: str


class PrewarmOptions(Naming, total=False):
    """Fields of PrewarmRequest."""

    workers: int
    ttl_s: float


class Options(Naming, total=False):
    """Fields of GenerateRequest and of SamplingParams; what is left out takes the .proto's default."""

    request_id: str
    n: int
    priority: int
    response_format: pb.ResponseFormat
    pins: Sequence[pb.Pin]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    speculate: bool


def generate_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Return the request. Raises InvalidRequest for what has no encoding, TypeError for a wrong type."""
    given = dict(options)
    sampling = {name: given.pop(name) for name in list(given) if name in _SAMPLING}
    request = _built(pb.GenerateRequest, given | _input(prompt))
    request.sampling.CopyFrom(_built(pb.SamplingParams, sampling))
    return request


def prewarm_request(prompt: Prompt, options: PrewarmOptions) -> pb.PrewarmRequest:
    """Return the request. Raises as `generate_request`."""
    return _built(pb.PrewarmRequest, dict(options) | _input(prompt))


def tokenize_request(prompt: str | pb.Chat, model: str, cache_salt: str) -> pb.TokenizeRequest:
    """Return the request. Raises as `generate_request`."""
    return _built(pb.TokenizeRequest, {"model": model, "cache_salt": cache_salt} | _input(prompt))


def event_of(response: pb.GenerateResponse) -> Event | None:
    """Return what a message of a stream says; None for what this client does not know yet."""
    match response.WhichOneof("event"):
        case "started":
            return response.started
        case "delta":
            return response.delta
        case "finished":
            return response.finished
        case _:
            return None


def _input(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, pb.Chat):
        return {"chat": prompt}
    try:
        return {"token_ids": pb.TokenIds(ids=prompt)}
    except ValueError as error:
        raise InvalidRequest("token_ids", str(error)) from error


def _built(message: type[Made], fields: dict[str, Any]) -> Made:
    """Make a message, naming the field whose value is beyond its type."""
    built = message()
    for name, value in fields.items():
        try:
            built.MergeFrom(message(**{name: value}))
        except ValueError as error:  # an unknown name is one, too
            raise InvalidRequest(name, str(error)) from error
    return built
