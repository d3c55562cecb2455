"""What this router's model has said: the token ids of assistants' turns, for when they come back.

A text has many tokenisations, and a model's own is seldom the tokenizer's. With the ids that were generated,
the next turn's prompt begins with what the worker holds; with others it stops hitting where they differ.

A turn is found by a digest of its cache salt, of all that was said before it, and of itself; and it counts
only after the very ids that it was generated after. So nothing passes from one salt, or one conversation, to
another, and a client that changes a word gets what it wrote, tokenised.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from kvhive.router.chat.messages import ChatMessage, ToolCall
from kvhive.router.chat.tool_prompts import call_arguments

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Of memory: some 16 million tokens. What was not asked for longest goes first."""
_ENTRY_BYTES = 400
"""What a turn takes besides its ids and text."""


@dataclass(frozen=True, slots=True)
class KnownTurn:
    """What an assistant said."""

    after: bytes
    """Digest of the ids of the prompt that it answered."""
    packed: bytes
    """Its ids, without the one that ended it: the template writes that."""
    rest: str = ""
    """The end of its text, where a stop string cut a token in two."""


class KnownTurns:
    """Thread-safe; bounded, the latest used stays."""

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._turns: OrderedDict[bytes, KnownTurn] = OrderedDict()
        self._lock = Lock()
        self.kept_bytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def get(self, key: bytes) -> KnownTurn | None:
        """Return what is known by this key."""
        with self._lock:
            found = self._turns.get(key)
            if found is not None:
                self._turns.move_to_end(key)
            return found

    def keep(self, key: bytes, turn: KnownTurn) -> None:
        """Remember a turn; a later one of the same key takes its place."""
        with self._lock:
            if key in self._turns:
                self.kept_bytes -= _bytes_of(self._turns.pop(key))
            self._turns[key] = turn
            self.kept_bytes += _bytes_of(turn)
            while self.kept_bytes > self._max_kept_bytes:
                self.kept_bytes -= _bytes_of(self._turns.popitem(last=False)[1])


class SaidSoFar:
    """A digest of a conversation, message by message."""

    def __init__(self, salt: str) -> None:
        self._digest = hashlib.blake2b(f"{len(salt)}|{salt}".encode(), digest_size=16)

    def add(self, message: ChatMessage) -> None:
        """Go on by a message."""
        self._digest.update(_spelled(message))

    def key(self, turn: ChatMessage) -> bytes:
        """Return the key of a turn that comes next."""
        digest = self._digest.copy()
        digest.update(_spelled(turn))
        return digest.digest()


def digest_of(packed: bytes) -> bytes:
    """Return the digest of a prompt's ids."""
    return hashlib.blake2b(packed, digest_size=16).digest()


def _spelled(message: ChatMessage) -> bytes:
    """Return bytes that differ where messages do; calls are equal where their arguments mean the same."""
    if not message.tool_calls and not message.tool_call_id:
        return f"{message.role}|{len(message.content)}|{message.content}|".encode()
    content = message.content.strip() if message.tool_calls else message.content
    parts = [message.role, content, message.tool_call_id, *_of_calls(message.tool_calls)]
    return "".join(f"{len(part)}+{part}|" for part in parts).encode()


def _of_calls(calls: Sequence[ToolCall]) -> list[str]:
    return [
        part
        for call in calls
        for part in (call.id, call.name, json.dumps(call_arguments(call), sort_keys=True))
    ]


def _bytes_of(turn: KnownTurn) -> int:
    return len(turn.packed) + 4 * len(turn.rest) + _ENTRY_BYTES
