"""The one internal request that both doors build, and the limits that it keeps.

Every check is a pure function that raises InvalidRequest naming the field, the limit and the value. The
doors only translate spellings; what is allowed is decided here, once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.limits import (
    MAX_CACHE_NAME_CHARS,
    MAX_CHOICES,
    MAX_PIN_TTL_S,
    MAX_PINS,
    MAX_PRIORITY,
    MAX_REQUEST_ID_CHARS,
    MAX_TENANT_CHARS,
)
from kvhive.router.chat.messages import ChatPrompt, check_chat
from kvhive.router.field_checks import (
    check_above_zero,
    check_chars,
    check_range,
    check_text,
    check_token_ids,
    spell_text,
)
from kvhive.router.sampling_params import SamplingParams, check_min_tokens, check_sampling

MAX_PIN_TOKENS = 2**31 - 1
_REQUEST_ID = re.compile(r"[!-~]*")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, tokenised without a chat template."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids of the served model's vocabulary."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptPin:
    """The beginning of a text, or of token ids, is to stay cached."""

    ttl_s: float
    """After its last use."""
    tokens: int | None = None
    """How much of it; None: all. Full blocks of that count."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt


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
    n: int = 1
    """Answers to generate from the one prompt."""
    priority: int = 0
    """Higher goes first, and is refused later."""
    tenant: str = ""
    """Whose share of the cluster it takes, by the caller's own word."""
    pins: tuple[PromptPin, ...] = ()
    """What is to stay cached; a conversation says it by its breakpoints."""
    timeout_s: float | None = None
    """Seconds from now that the caller waits for the whole answer; None: as long as it takes."""


def validate_request(request: GenerateRequest, vocab_size: int, max_context: int) -> None:
    """Check all that can be checked before tokenising. Raises InvalidRequest.

    `check_prompt_length` and `resolve_max_tokens` complete it once the prompt's length is known.
    """
    check_text("model", request.model)
    check_chars("cache_salt", request.cache_salt, MAX_CACHE_NAME_CHARS)
    check_chars("cache_key", request.cache_key, MAX_CACHE_NAME_CHARS)
    check_chars("tenant", request.tenant, MAX_TENANT_CHARS)
    check_request_id("request_id", request.request_id)
    check_range("n", request.n, 1, MAX_CHOICES)
    check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_pins(request)
    check_sampling(request.sampling, vocab_size, max_context)
    match request.prompt:
        case TextPrompt(text):
            if not text:
                raise InvalidRequest("text", "must not be empty")
            check_text("text", text)
        case TokenPrompt(token_ids):
            check_token_ids("token_ids", token_ids, vocab_size)
            check_prompt_length("token_ids", len(token_ids), max_context)
        case ChatPrompt():
            check_chat(request.prompt)


def _check_pins(request: GenerateRequest) -> None:
    check_pin_count(len(request.pins))
    if request.pins and isinstance(request.prompt, ChatPrompt):
        raise InvalidRequest("pins", "must not be given with messages, which have breakpoints")
    for index, pin in enumerate(request.pins):
        check_above_zero(f"pins[{index}].ttl_s", pin.ttl_s, MAX_PIN_TTL_S)
        if pin.tokens is not None:
            check_range(f"pins[{index}].tokens", pin.tokens, 1, MAX_PIN_TOKENS)


def check_pin_count(count: int) -> None:
    """Check how many pins there are. Raises InvalidRequest."""
    if count > MAX_PINS:
        raise InvalidRequest("pins", f"must be at most {MAX_PINS}, is {count}")


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


def resolve_max_tokens(prompt_tokens: int, sampling: SamplingParams, max_context: int) -> int:
    """Return how many tokens may be generated after a prompt that passed `check_prompt_length`.

    Absent means all that the context leaves; asking for more than that is an error, not a silent clamp.
    Raises InvalidRequest naming the limit, the prompt and the context; or min_tokens, where it is more.
    """
    room = max_context - prompt_tokens
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if not 1 <= max_tokens <= room:
        raise InvalidRequest(
            "max_tokens",
            f"must be between 1 and {room} (the model's context of {max_context} less the prompt's "
            f"{prompt_tokens}), is {max_tokens}",
        )
    check_min_tokens(sampling.min_tokens, max_tokens)
    return max_tokens


def check_request_id(name: str, request_id: str) -> None:
    """Check an id that goes into headers and log lines: visible ASCII, no spaces. Raises InvalidRequest."""
    if len(request_id) > MAX_REQUEST_ID_CHARS or not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            name,
            f"must be at most {MAX_REQUEST_ID_CHARS} printable ASCII characters without spaces, "
            f"is {spell_text(request_id)}",
        )
