"""`system` and `messages` with their blocks, turned into the conversation that the model reads.

Blocks of one message are joined with nothing between, as the caller wrote nothing there; messages in a row
of one role are one turn, with an empty line between. A tool's result is a turn of its own. What an assistant
thought in earlier turns is left out, as its model would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvhive.proto.errors import InvalidRequest
from kvhive.router.anthropic.cache_control import Markers, ttl_of
from kvhive.router.anthropic.fields import Fields
from kvhive.router.chat.messages import MAX_MESSAGES, ChatMessage, ToolCall
from kvhive.router.http_body import json_type

ROLES = ("user", "assistant", "system")
BETWEEN_MESSAGES = "\n\n"
"""Between two messages of one role."""
ERROR_MARK = "Error: "
"""Before the content of a tool's result with is_error, which the model would not see otherwise."""
_THOUGHTS = ("thinking", "redacted_thinking")


@dataclass(slots=True)
class Turn:
    """One message of the conversation, while it grows."""

    role: str
    where: str
    """The path of its content in the body, for errors."""
    pieces: list[str] = field(default_factory=list)
    chars: int = 0
    calls: list[ToolCall] = field(default_factory=list)
    call_id: str = ""

    def add(self, text: str) -> None:
        """Append text."""
        self.pieces.append(text)
        self.chars += len(text)

    @property
    def message(self) -> ChatMessage:
        """What it has become."""
        return ChatMessage(self.role, "".join(self.pieces), tuple(self.calls), self.call_id)


class Conversation:
    """The turns of one body, with the markers that stand in them."""

    def __init__(self, markers: Markers) -> None:
        self.turns: list[Turn] = []
        self._markers = markers
        self._calls: set[str] = set()
        self._last_block: tuple[str, int, int | None] | None = None

    def read(self, body: Fields) -> None:
        """Read the body's `system` and `messages`. Raises InvalidRequest."""
        system = body.take_any("system")
        for block in _blocks("system", "" if system is None else system, body):
            block.one_of("type", ("text",))
            self._turn("system", "system")
            self._text(block)
        messages: list[object] = body.need("messages", list)
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest("messages", f"must be at most {MAX_MESSAGES} messages, is {len(messages)}")
        for index, message in enumerate(messages):
            self._message(Fields(f"messages[{index}]", message, body.ignored))
        said = [turn for turn in self.turns if turn.role != "system"]
        if not said:
            raise InvalidRequest("messages", "must have a message of the user's")
        if said[0].role == "assistant":
            raise InvalidRequest("messages[0].role", "must be user for the first message, is assistant")
        if self.turns[-1].role == "assistant":
            raise InvalidRequest(
                "messages",
                "must end with a message of the user's: to continue an assistant's is not supported",
            )

    def mark_last(self, ttl: str) -> None:
        """Note the body's own marker on its last block. Raises InvalidRequest."""
        if self._last_block is not None:
            self._markers.note_whole(ttl, *self._last_block)

    @property
    def whole(self) -> list[int | None]:
        """How many characters are all of each turn; None: it has more than text."""
        return [None if turn.calls else turn.chars for turn in self.turns]

    def _message(self, fields: Fields) -> None:
        role = fields.one_of("role", ROLES)
        where = fields.path("content")
        content = fields.take_any("content")
        fields.close()
        if content is None:
            raise InvalidRequest(where, "is required")
        if not content and role != "assistant":  # which may have had nothing to say
            raise InvalidRequest(where, "must not be empty")
        if role == "assistant":
            self._turn(role, where)
        first = True
        for block in _blocks(where, content, fields):
            kind = block.one_of("type", _KINDS[role])
            match kind:
                case "text":
                    self._turn(role, block.where)
                    if first and self.turns[-1].chars:
                        self.turns[-1].add(BETWEEN_MESSAGES)
                    self._text(block)
                    first = False
                case "tool_use":
                    self._turn(role, block.where)
                    self._call(block)
                case "tool_result":
                    self._result(block)
                case _:
                    if block.take_any("cache_control") is not None:
                        raise InvalidRequest(block.path("cache_control"), f"must not be on {kind}")
                    block.ignored.note(f"messages.content.{kind}")

    def _turn(self, role: str, where: str, new: bool = False) -> None:
        """Have a turn of this role as the last one."""
        if new or not self.turns or self.turns[-1].role != role:
            self.turns.append(Turn(role, where))

    def _text(self, block: Fields) -> None:
        """Read a text block into the last turn."""
        ttl = ttl_of(block)
        text: str = block.need("text", str)
        block.take_any("type")
        block.ignore({"citations": "messages.content.citations"})
        block.close()
        if ttl and not text:
            raise InvalidRequest(block.path("cache_control"), "must not be on an empty text")
        self.turns[-1].add(text)
        self._ended(block.where, ttl, self.turns[-1].chars)

    def _call(self, block: Fields) -> None:
        ttl = ttl_of(block)
        call = ToolCall(
            id=block.need("id", str),
            name=block.need("name", str),
            arguments=block.need_json("input"),
        )
        block.ignore({"caller": "messages.content.caller"})
        block.close()
        if call.id in self._calls:
            raise InvalidRequest(block.path("id"), f"must be unique, {call.id[:64]!a} is not")
        self._calls.add(call.id)
        self.turns[-1].calls.append(call)
        self._ended(block.where, ttl, None)

    def _result(self, block: Fields) -> None:
        ttl = ttl_of(block)
        call_id: str = block.need("tool_use_id", str)
        failed: bool = block.take("is_error", bool, False)
        content = block.take_any("content")
        block.close()
        if call_id not in self._calls:
            raise InvalidRequest(
                block.path("tool_use_id"), f"must be the id of a tool_use before it, is {call_id[:64]!a}"
            )
        self._turn("tool", block.path("content"), new=True)
        self.turns[-1].call_id = call_id
        if failed:
            self.turns[-1].add(ERROR_MARK)
        for part in _blocks(block.path("content"), "" if content is None else content, block):
            part.one_of("type", ("text",))
            self._text(part)
        self._ended(block.where, ttl, None)

    def _ended(self, where: str, ttl: str | None, chars: int | None) -> None:
        """A block of the last turn has ended."""
        self._last_block = where, len(self.turns) - 1, chars
        if ttl:
            self._markers.note(ttl, *self._last_block)


_KINDS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", *_THOUGHTS),
    "system": ("text",),
}
"""The blocks that a message of each role may have: images and documents are not among them."""


def _blocks(where: str, content: object, owner: Fields) -> Iterator[Fields]:
    """Yield the blocks of a content; plain text is one of its own. Raises InvalidRequest."""
    if isinstance(content, str):
        if content:
            yield Fields(where, {"type": "text", "text": content}, owner.ignored)
        return
    if not isinstance(content, list):
        raise InvalidRequest(where, f"must be a string or an array of blocks, is {json_type(content)}")
    for index, block in enumerate(content):
        yield Fields(f"{where}[{index}]", block, owner.ignored)
