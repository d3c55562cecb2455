"""The body of POST /v1/chat/completions, turned into the internal request."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.messages import ChatPrompt
from kvhive.router.json_fields import typed
from kvhive.router.openai.chat_messages import read_messages
from kvhive.router.openai.chat_tools import read_tools
from kvhive.router.openai.field_policy import NEUTRAL_IN_CHATS, OBEYED_IN_CHATS, given_fields
from kvhive.router.openai.fields import (
    SPELLINGS,
    CompletionRequest,
    generate_request,
    sampling_fields,
    stream_fields,
)
from kvhive.router.openai.output_format import grammar_field
from kvhive.router.openai.prompt_cache import breakpoints, read_cache_options
from kvhive.router.sampling_params import Grammar, check_logprobs

_SPELLINGS = {"prompt": "messages", "cache_control": "prompt_cache_breakpoint", **SPELLINGS}
_IN_A_FUNCTION = re.compile(
    r"((?:messages\[\d+\]\.tool_calls|tools)\[\d+\])\.(name|description|parameters|arguments)"
)


def parse_chat_completion(body: dict[str, Any], request_id: str) -> CompletionRequest:
    """Read a parsed JSON body. Raises InvalidRequest naming the field, what it must be and what it is."""
    given = given_fields(body, OBEYED_IN_CHATS, NEUTRAL_IN_CHATS)
    stream, include_usage = stream_fields(given)
    conversation = read_messages(given)
    tools, choice = read_tools(given)
    cache = read_cache_options(given)
    points = breakpoints(given, cache, conversation.markers, len(conversation.messages))
    prompt = ChatPrompt(conversation.messages, tools, choice, points)
    sampling = sampling_fields(given, _max_tokens(given), _logprobs(given))
    request = generate_request(given, prompt, sampling, request_id)
    return CompletionRequest(
        (request,),
        stream,
        include_usage,
        spell=functools.partial(_spelling, sampling.grammar),
        prewarm=cache.prewarm,
        ignored=given.ignored,
    )


def _spelling(grammar: Grammar | None, prompt: int, field: str) -> str:
    if field in ("grammar", "response_format"):
        return grammar_field(grammar)
    return spell_chat_field(field)


def spell_chat_field(field: str) -> str:
    """Return what a body calls a field of a conversation: `tools[3].name` is `tools[3].function.name`."""
    return _SPELLINGS.get(field) or _IN_A_FUNCTION.sub(r"\1.function.\2", field)


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    old: int | None = typed(given, "max_tokens", int, None)
    new: int | None = typed(given, "max_completion_tokens", int, None)
    if old is not None and new is not None and old != new:
        raise InvalidRequest("max_completion_tokens", "must equal max_tokens where both are given")
    return old if new is None else new


def _logprobs(given: Mapping[str, Any]) -> int | None:
    wanted = typed(given, "logprobs", bool, False)
    top: int = typed(given, "top_logprobs", int, 0)
    check_logprobs("top_logprobs", top)
    if top and not wanted:
        raise InvalidRequest("top_logprobs", "is only allowed with logprobs: true")
    return top if wanted else None
