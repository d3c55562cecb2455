"""The one internal request that both doors build, and the limits that it keeps.

Every check is a pure function that raises InvalidRequest naming the field, the limit and the value. The
doors only translate spellings; what is allowed is decided here, once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.limits import MAX_CACHE_NAME_CHARS, MAX_REQUEST_ID_CHARS, MAX_TEMPERATURE

ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 4096
"""Rendering is linear in messages; more than this is an error of the caller's, not a conversation."""
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 256
"""Bounds the text that may have to be held back from a stream."""
MAX_STOP_TOKEN_IDS = 64
_REQUEST_ID = re.compile(r"[!-~]*")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, tokenised without a chat template."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids of the served model's vocabulary."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered with the model's chat template."""

    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output is chosen and where it ends; the defaults are those of `inference.proto`."""

    max_tokens: int | None = None
    """Most tokens to generate; None is as many as the context leaves room for (`resolve_max_tokens`)."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None is random."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What to generate. `validate_request` says whether it may be."""

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    model: str = ""
    """Empty means the one that is served."""
    cache_salt: str = ""
    """Requests share cached blocks only with requests of the same salt."""
    cache_key: str = ""
    """A hint about which worker is home; never joins or separates caches."""
    request_id: str = ""
    """Empty lets the router choose."""


def validate_request(request: GenerateRequest, vocab_size: int, max_context: int) -> None:
    """Check all that can be checked before tokenising. Raises InvalidRequest.

    `check_prompt_length` and `resolve_max_tokens` complete it once the prompt's length is known.
    """
    check_text("model", request.model)
    _check_chars("cache_salt", request.cache_salt, MAX_CACHE_NAME_CHARS)
    _check_chars("cache_key", request.cache_key, MAX_CACHE_NAME_CHARS)
    check_request_id("request_id", request.request_id)
    check_sampling(request.sampling, vocab_size, max_context)
    match request.prompt:
        case TextPrompt(text):
            if not text:
                raise InvalidRequest("text", "must not be empty")
            check_text("text", text)
        case TokenPrompt(token_ids):
            check_token_ids("token_ids", token_ids, vocab_size)
            check_prompt_length("token_ids", len(token_ids), max_context)
        case ChatPrompt(messages):
            check_messages(messages)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Check a conversation: 1 to MAX_MESSAGES turns, known roles, well-formed text. Raises InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"must be at most {MAX_MESSAGES} messages, is {len(messages)}")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"messages[{index}].role", f"must be one of {', '.join(ROLES)}, is {_shown(message.role)}"
            )
        check_text(f"messages[{index}].content", message.content)


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Check that there are ids, each in the vocabulary. Raises InvalidRequest naming the first bad one."""
    if not token_ids:
        raise InvalidRequest(name, "must not be empty")
    if min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    index, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
    raise InvalidRequest(f"{name}[{index}]", f"must be between 0 and {vocab_size - 1}, is {bad}")


def check_prompt_length(name: str, prompt_tokens: int, max_context: int) -> None:
    """Check that a prompt leaves room for one token of output. Raises InvalidRequest naming both numbers."""
    if prompt_tokens < 1:
        raise InvalidRequest(name, "must have at least 1 token, has 0")
    if prompt_tokens >= max_context:
        raise InvalidRequest(
            name,
            f"must have at most {max_context - 1} tokens, to leave room for output in the model's context "
            f"of {max_context}; has {prompt_tokens}",
        )


def resolve_max_tokens(prompt_tokens: int, max_tokens: int | None, max_context: int) -> int:
    """Return how many tokens may be generated after a prompt that passed `check_prompt_length`.

    Absent means all that the context leaves; asking for more than that is an error, not a silent clamp.
    Raises InvalidRequest naming the limit, the prompt and the context.
    """
    room = max_context - prompt_tokens
    if max_tokens is None:
        return room
    if not 1 <= max_tokens <= room:
        raise InvalidRequest(
            "max_tokens",
            f"must be between 1 and {room} (the model's context of {max_context} less the prompt's "
            f"{prompt_tokens}), is {max_tokens}",
        )
    return max_tokens


def check_sampling(sampling: SamplingParams, vocab_size: int, max_context: int) -> None:
    """Check each sampling parameter alone. Raises InvalidRequest."""
    if sampling.max_tokens is not None:
        _check_range("max_tokens", sampling.max_tokens, 1, max_context)
    _check_range("temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    _check_range("top_k", sampling.top_k, 0, MAX_TOP_K)
    _check_range("top_p", sampling.top_p, 0, 1)
    if sampling.top_p == 0:
        raise InvalidRequest("top_p", "must be above 0 and at most 1, is 0")
    _check_range("min_p", sampling.min_p, 0, 1)
    if sampling.seed is not None:
        _check_range("seed", sampling.seed, 0, MAX_SEED)
    if len(sampling.stop) > MAX_STOPS:
        raise InvalidRequest("stop", f"must be at most {MAX_STOPS} strings, is {len(sampling.stop)}")
    for index, stop in enumerate(sampling.stop):
        if not stop:
            raise InvalidRequest(f"stop[{index}]", f"must be 1 to {MAX_STOP_CHARS} characters, is empty")
        _check_chars(f"stop[{index}]", stop, MAX_STOP_CHARS)
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stop_token_ids", f"must be at most {MAX_STOP_TOKEN_IDS} ids, is {len(sampling.stop_token_ids)}"
        )
    if sampling.stop_token_ids:
        check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)


def check_request_id(name: str, request_id: str) -> None:
    """Check an id that goes into headers and log lines: visible ASCII, no spaces. Raises InvalidRequest."""
    if len(request_id) > MAX_REQUEST_ID_CHARS or not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            name,
            f"must be at most {MAX_REQUEST_ID_CHARS} printable ASCII characters without spaces, "
            f"is {_shown(request_id)}",
        )


def check_text(name: str, text: str) -> None:
    """Check that text can be encoded as UTF-8. Raises InvalidRequest at a lone surrogate."""
    bad = _SURROGATE.search(text)
    if bad:
        raise InvalidRequest(
            name, f"must be valid Unicode, has the lone surrogate U+{ord(bad[0]):04X} at {bad.start()}"
        )


def _check_chars(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(name, f"must be at most {limit} characters, is {len(text)}")
    check_text(name, text)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN and infinities
        raise InvalidRequest(name, f"must be between {low} and {high}, is {_number(value)}")


def _number(value: float) -> str:
    """Spell a caller's number without letting a huge integer make a huge message."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"an integer of {value.bit_length()} bits"
    return f"{value}"


def _shown(text: str) -> str:
    """Quote a caller's text for a message, shortened and in ASCII."""
    return ascii(text if len(text) <= 64 else text[:64] + "...")
