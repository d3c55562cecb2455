"""What becomes of each field of a body: one table for both of OpenAI's completion endpoints.

A field that is not listed is refused by name, whether it is misspelled or only unknown here: the answer would
not be the one that was asked for. What leaves the answer as it is may be ignored, and the response says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.http_headers import IGNORED_HEADER

OBEYED = frozenset(
    {
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
        "cache_salt",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "response_format",
        "regex",
        "grammar",
    }
)
OBEYED_IN_CHATS = OBEYED | {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
}
OBEYED_IN_TEXTS = OBEYED | {"prompt", "echo"}

IGNORED = frozenset(
    {
        "metadata",  # stored with the answer there; nothing is stored here
        "store",
        "service_tier",  # a price; `priority` is ours
        "prediction",  # a guess at the answer, to have it sooner
    }
)

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
NEUTRAL_IN_CHATS: Mapping[str, tuple[object, ...]] = {
    **_NEUTRAL,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "echo": (False,),
}
NEUTRAL_IN_TEXTS: Mapping[str, tuple[object, ...]] = {
    **_NEUTRAL,
    "suffix": ("",),
    "add_special_tokens": (True,),
}
"""Fields that are not supported, with the values that ask for nothing."""

IGNORED_STREAM_OPTIONS = frozenset({"include_obfuscation", "continuous_usage_stats"})
IGNORED_IN_MESSAGES = frozenset({"name", "refusal", "annotations"})


class GivenFields(dict[str, Any]):
    """The fields of one body that are not null, and which of them changed nothing."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__((name, value) for name, value in fields.items() if value is not None)
        self._ignored: dict[str, None] = {}

    def ignore(self, name: str) -> None:
        """Note a field that changed nothing."""
        self._ignored[name] = None

    @property
    def ignored(self) -> tuple[str, ...]:
        """Those fields, each once."""
        return tuple(self._ignored)


def given_fields(
    body: Mapping[str, Any], obeyed: frozenset[str], neutral: Mapping[str, tuple[object, ...]]
) -> GivenFields:
    """Return the fields that are not null. Raises InvalidRequest for one that is not supported.

    A field of `neutral` may have those values alone.
    """
    given = GivenFields(body)
    for name, value in given.items():
        if name in obeyed:
            continue
        if name in IGNORED:
            given.ignore(name)
        elif name not in neutral:
            raise InvalidRequest(spell_name(name), "is not supported")
        # A boolean equals a number in Python but not in JSON.
        elif not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral[name]):
            raise InvalidRequest(
                name, f"is not supported, other than {' or '.join(map(_spelled, neutral[name]))}"
            )
    return given


def refuse_others(where: str, value: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise InvalidRequest for a field of an inner object that is not known and asks for something."""
    for name, held in value.items():
        if name not in known and held not in (None, [], {}, ""):
            raise InvalidRequest(f"{where}.{spell_name(name)}", "is not supported")


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that names fields which changed nothing, where there are any."""
    return {IGNORED_HEADER: ",".join(names)} if names else {}


def spell_name(name: str) -> str:
    """Return a caller's name of a field, shortened and in ASCII."""
    return ascii(name[:64])[1:-1]


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
