"""The bodies of POST /v1/messages and of its count_tokens, turned into the internal request.

Every field is read, ignored by name, or refused by name. Limits are checked behind this door, by
`validate_request`, as for all others; those that only this dialect has, here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.anthropic.cache_control import Markers, ttl_of
from kvhive.router.anthropic.conversation import Conversation
from kvhive.router.anthropic.fields import Fields, Ignored
from kvhive.router.anthropic.tools import read_tool_choice, read_tools
from kvhive.router.chat.messages import ChatPrompt
from kvhive.router.field_checks import check_range
from kvhive.router.http_headers import CACHE_KEY_HEADER
from kvhive.router.json_fields import typed
from kvhive.router.request import GenerateRequest
from kvhive.router.sampling_params import Grammar, SamplingParams

MAX_TEMPERATURE = 1.0
"""Anthropic's, and its default."""
IGNORED = ("service_tier", "inference_geo", "speed", "diagnostics")
"""Fields that change nothing here."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "fallbacks": ([],),
}
"""Fields that are not supported, with the values that ask for nothing."""
THINKING = ("disabled", "adaptive", "between_tools")
"""What a model that does not think may be told: the last two leave it the choice."""
_SPELLINGS = {
    "tenant": "metadata.user_id",
    "cache_key": CACHE_KEY_HEADER,
    "request_id": "x-request-id",
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
}
"""What fields of the internal request are called here, where that is something else."""
_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content)?")


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """One parsed body."""

    request: GenerateRequest
    stream: bool
    prewarm: bool
    """Whether the prompt is to be computed and nothing generated: max_tokens 0."""
    ignored: tuple[str, ...]
    """Fields that changed nothing, by name."""
    places: tuple[str, ...]
    """Where each message of the internal request stands in the body."""

    def spell(self, field: str) -> str:
        """Return what this body calls a field of the internal request."""
        message = _MESSAGE.match(field)
        if message and int(message[1]) < len(self.places):
            return self.places[int(message[1])] + field[message.end() :]
        name, bracket, rest = field.partition("[")
        return (_SPELLINGS.get(name, name) + bracket + rest).replace(".parameters", ".input_schema")


def parse_messages(body: dict[str, Any], request_id: str, cache_key: str) -> MessagesRequest:
    """Read the body of a message to be created. Raises InvalidRequest naming the field."""
    fields = Fields("", body, Ignored())
    prompt, places = _prompt(fields)
    max_tokens: int = fields.need("max_tokens", int)
    stream: bool = fields.take("stream", bool, False)
    if stream and max_tokens == 0:
        raise InvalidRequest("stream", "must be false with max_tokens 0, which only fills the cache")
    sampling = SamplingParams(
        max_tokens=max_tokens or 1,
        temperature=_temperature(fields),
        top_k=fields.take("top_k", int, 0),
        top_p=fields.number("top_p", 1.0),
        stop=_stops(fields),
        grammar=_grammar(fields),
    )
    request = GenerateRequest(
        prompt=prompt,
        sampling=sampling,
        model=fields.take("model", str, ""),
        cache_key=cache_key,
        request_id=request_id,
        tenant=_user(fields),
    )
    _rest(fields)
    return MessagesRequest(request, stream, max_tokens == 0, fields.ignored.names, places)


def parse_count(body: dict[str, Any], request_id: str) -> MessagesRequest:
    """Read the body of a prompt whose tokens are to be counted. Raises InvalidRequest naming the field."""
    fields = Fields("", body, Ignored())
    prompt, places = _prompt(fields)
    _grammar(fields)
    request = GenerateRequest(prompt, model=fields.take("model", str, ""), request_id=request_id)
    _rest(fields)
    return MessagesRequest(request, False, False, fields.ignored.names, places)


def _prompt(fields: Fields) -> tuple[ChatPrompt, tuple[str, ...]]:
    markers = Markers()
    conversation = Conversation(markers)
    ttl = ttl_of(fields)
    tools = read_tools(fields, markers)
    conversation.read(fields)
    if ttl:
        conversation.mark_last(ttl)
    turns = conversation.turns
    prompt = ChatPrompt(
        tuple(turn.message for turn in turns),
        tools,
        read_tool_choice(fields),
        markers.breakpoints(conversation.whole),
    )
    return prompt, tuple(turn.where for turn in turns)


def _temperature(fields: Fields) -> float:
    temperature = fields.number("temperature", MAX_TEMPERATURE)
    check_range("temperature", temperature, 0, MAX_TEMPERATURE)
    return temperature


def _stops(fields: Fields) -> tuple[str, ...]:
    stops: list[Any] = fields.take("stop_sequences", list, [])
    return tuple(
        typed({f"stop_sequences[{i}]": s}, f"stop_sequences[{i}]", str, "") for i, s in enumerate(stops)
    )


def _grammar(fields: Fields) -> Grammar | None:
    """Read `output_config`, of which the format alone counts. Raises InvalidRequest."""
    output = fields.child("output_config")
    if output is None:
        return None
    output.ignore({"effort": "output_config.effort"})
    layout = output.child("format")
    output.close()
    if layout is None:
        return None
    layout.one_of("type", ("json_schema",))
    schema = layout.need_schema("schema")
    layout.close()
    return Grammar("json_schema", schema)


def _user(fields: Fields) -> str:
    metadata = fields.child("metadata")
    if metadata is None:
        return ""
    user: str = metadata.take("user_id", str, "")
    metadata.close()
    return user


def _edits(fields: Fields) -> None:
    """Read `context_management`: who asks to drop thoughts gets that anyway. Raises InvalidRequest."""
    management = fields.child("context_management")
    if management is None:
        return
    for index, edit in enumerate(management.take("edits", list, [])):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(kind, str) or not kind.startswith("clear_thinking_"):
            raise InvalidRequest(
                management.path(f"edits[{index}]"), "is not supported, other than clear_thinking"
            )
        fields.ignored.note("context_management")
    management.close()


def _rest(fields: Fields) -> None:
    """Take what is left of a body. Raises InvalidRequest for what would change the answer."""
    thinking = fields.child("thinking")
    if thinking is not None and thinking.one_of("type", THINKING) != "disabled":
        fields.ignored.note("thinking")
    _edits(fields)
    fields.ignore({name: name for name in IGNORED})
    for name, values in NEUTRAL.items():
        fields.only(name, values)
    fields.close()
