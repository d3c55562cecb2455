"""Conversations to token ids: the template's text, with what needs care put in apart from it.

That is what this router's model said before, whose own ids are used again; control tokens that somebody
typed, which stay text; and breakpoints, of which the place among the ids is wanted. A conversation without
them is one text, which is tokenised as any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.answers import Answer
from kvhive.router.chat.control_text import Typed
from kvhive.router.chat.generated_turn import generated_turn
from kvhive.router.chat.known_turns import KnownTurn, KnownTurns, SaidSoFar, digest_of
from kvhive.router.chat.marked_text import MarkedText
from kvhive.router.chat.marks import Marks
from kvhive.router.chat.messages import ChatMessage, ChatPrompt
from kvhive.router.known_text import PartlyKnown
from kvhive.router.tokenizer import TextTokenizer

MOST_PARTLY_TYPED_CHARS = 64 * 1024
"""Of a text with typed control tokens, inside which breakpoints are looked for by tokenising it again."""
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Plain:
    text: str
    known: PartlyKnown
    behind: bool
    """Whether it is tokenised as what stands behind other text."""


@dataclass(frozen=True, slots=True)
class _Turn:
    message: int


_Piece = _Plain | Typed | _Turn


@dataclass(frozen=True, slots=True)
class MarkedChat:
    """A conversation that is rendered with marks, cut at them, and to be tokenised."""

    prompt: ChatPrompt
    turns: Mapping[int, KnownTurn]
    pieces: Sequence[_Piece]
    beginnings: Sequence[tuple[int, Sequence[_Piece]]]
    """What lies before each breakpoint: so many pieces, and part of the next one."""

    @property
    def unknown_chars(self) -> int:
        """How many characters are still to be tokenised."""
        typed = sum(len(piece.text) for piece in self.pieces if isinstance(piece, Typed))
        return typed + sum(p.known.unknown_chars for p in self.pieces if isinstance(p, _Plain))


class Conversations:
    """One model's. Thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, known: KnownTurns | None = None) -> None:
        self._tokenizer = tokenizer
        self._control = tokenizer.control_tokens
        self._joint = tokenizer.joint
        self._known = KnownTurns() if known is None else known

    def encode(self, prompt: ChatPrompt, salt: str = "") -> tuple[bytes, tuple[int, ...]]:
        """Return a conversation's packed ids, and how many of them lie before each breakpoint.

        Raises InvalidRequest when the template refuses it, or when it cannot fit into the context.
        """
        return self.complete(self.begin(prompt, salt))

    def begin(self, prompt: ChatPrompt, salt: str) -> PartlyKnown | MarkedChat:
        """Begin to `encode`: render, and look up what was tokenised before."""
        turns = self._turns(prompt.messages, salt)
        if turns or prompt.breakpoints or self._control.typed_in_chat(prompt):
            return self._marked(prompt, turns)
        text = self._tokenizer.render_chat(prompt.messages, prompt.tools)
        return self._looked_up(text)

    def complete(self, chat: PartlyKnown | MarkedChat) -> tuple[bytes, tuple[int, ...]]:
        """Tokenise the rest."""
        if isinstance(chat, PartlyKnown):
            return self._tokenizer.complete(chat), ()
        packed, missed = self._encoded(chat.pieces, chat.turns)
        while missed is not None:
            # It was generated after other ids. What was said before it did fit.
            fitting = {index: turn for index, turn in chat.turns.items() if index < missed}
            chat = self._marked(chat.prompt, fitting)
            packed, missed = self._encoded(chat.pieces, chat.turns)
        ends = []
        for whole, part in chat.beginnings:
            before = sum(map(len, packed[:whole]))
            begun = b"".join(self._encoded(part, {})[0])
            rest = b"".join(packed[whole : whole + 1])
            ends.append(before // _TOKEN_BYTES + _common_tokens(rest, begun))
        return b"".join(packed), tuple(ends)

    def remember(
        self, prompt: ChatPrompt, salt: str, packed: bytes, answer: Answer, ends: Collection[int]
    ) -> None:
        """Keep the ids of what a conversation, whose own are given, was answered."""
        said = answer.message()
        turn = generated_turn(self._tokenizer, answer, said, ends, digest_of(packed))
        if turn is None:
            return
        so_far = SaidSoFar(salt)
        for message in prompt.messages:
            so_far.add(message)
        self._known.keep(so_far.key(said), turn)

    def _turns(self, messages: Sequence[ChatMessage], salt: str) -> dict[int, KnownTurn]:
        """Return the messages that may be what this model said."""
        found: dict[int, KnownTurn] = {}
        said = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if not said or not self._known or self._joint is None:
            return found
        so_far = SaidSoFar(salt)
        for index, message in enumerate(messages[: said[-1] + 1]):
            if message.role == "assistant" and not self._dropped(message):
                turn = self._known.get(so_far.key(message))
                if turn is not None:
                    found[index] = turn
            so_far.add(message)
        return found

    def _dropped(self, message: ChatMessage) -> bool:
        """Whether the template shows only a part of it."""
        return self._tokenizer.drops_thoughts and "</think>" in message.content

    def _marked(self, prompt: ChatPrompt, turns: Mapping[int, KnownTurn]) -> MarkedChat:
        try:
            marked = MarkedText(self._tokenizer, prompt, turns)
        except InvalidRequest:
            if not turns:
                raise
            return self._marked(prompt, _less(prompt, turns))  # a template that misses the calls
        self._tokenizer.check_length(self._control.spelled_again(marked.text, marked.marks))
        placed = self._cut(marked.text, turns, marked.marks)
        beginnings = [self._beginning(marked, end, placed) for end in marked.breakpoints()]
        return MarkedChat(prompt, turns, [piece for _, piece in placed], beginnings)

    def _beginning(
        self, marked: MarkedText, end: int, placed: Sequence[tuple[int, _Piece]]
    ) -> tuple[int, Sequence[_Piece]]:
        """Return how many pieces lie before a place in the text, and what does of the next one."""
        begun = sum(place < end for place, _ in placed)
        after = placed[begun][0] if begun < len(placed) else len(marked.text)
        place, piece = placed[begun - 1] if begun else (0, None)
        if piece is None or after == end or isinstance(piece, _Turn):
            return begun, ()
        if isinstance(piece, Typed) and len(piece.text) > MOST_PARTLY_TYPED_CHARS:
            return begun - 1, ()
        texts = self._texts(marked.text[place:end], place, marked.marks, behind=piece.behind)
        return begun - 1, [piece for _, piece in texts]

    def _cut(self, text: str, turns: Mapping[int, KnownTurn], marks: Marks) -> list[tuple[int, _Piece]]:
        """Cut a rendered text at its marks, and look up what is only text; say where each piece begins."""
        pieces: list[tuple[int, _Piece]] = []
        start, behind = 0, False
        for begin, end, message in marks.turns(text):
            pieces += self._texts(text[start:begin], start, marks, ended=True, behind=behind)
            pieces.append((begin, _Turn(message)))
            behind = True
            pieces += [(end, piece) for _, piece in self._texts(turns[message].rest, end, marks, behind=True)]
            start = end
        return [*pieces, *self._texts(text[start:], start, marks, behind=behind)]

    def _texts(
        self, text: str, start: int, marks: Marks, ended: bool = False, behind: bool = False
    ) -> list[tuple[int, _Piece]]:
        pieces: list[tuple[int, _Piece]] = []
        for place, piece in self._control.apart(text, marks):
            if place:  # it begins with a control token, or stands behind one
                behind = self._joint is not None and self._joint.behind_control
            if isinstance(piece, Typed):
                pieces.append((start + place, Typed(piece.text, behind)))
            else:
                known = self._looked_up(piece, ended, behind)
                pieces.append((start + place, _Plain(piece, known, behind)))
        return pieces

    def _looked_up(self, text: str, ended: bool = False, behind: bool = False) -> PartlyKnown:
        # The template writes BOS itself.
        return self._tokenizer.look_up(text, add_special_tokens=False, ended=ended, behind=behind)

    def _encoded(
        self, pieces: Sequence[_Piece], turns: Mapping[int, KnownTurn]
    ) -> tuple[list[bytes], int | None]:
        """Return each piece's ids; or the message of the first turn that was generated after others."""
        packed = list[bytes]()
        so_far = before = hashlib.blake2b(digest_size=16)
        for index, piece in enumerate(pieces):
            if isinstance(piece, _Turn):
                turn = turns[piece.message]
                if so_far.digest() != turn.after:
                    trimmed = self._trimmed(pieces[index - 1] if index else None)
                    so_far = before.copy()
                    so_far.update(trimmed)
                    if so_far.digest() != turn.after:
                        return [], piece.message
                    packed[-1:] = [trimmed]
                ids = turn.packed
            elif isinstance(piece, _Plain):
                ids = self._tokenizer.complete(piece.known)
            else:
                ids = self._tokenizer.encode_typed(piece.text, piece.behind)
            packed.append(ids)
            before = so_far.copy()
            so_far.update(ids)
        return packed, None

    def _trimmed(self, piece: _Piece | None) -> bytes:
        """Return the ids of a text without spaces at its end: some templates put one before what was said."""
        match piece:
            case _Plain(text, behind=behind):
                return self._tokenizer.complete(self._looked_up(text.rstrip(" "), behind=behind))
            case Typed(text, behind):
                return self._tokenizer.encode_typed(text.rstrip(" "), behind)
        return b""


def _less(prompt: ChatPrompt, turns: Mapping[int, KnownTurn]) -> dict[int, KnownTurn]:
    """Return the turns without those that call tools, if there are any; else none."""
    silent = {index: turn for index, turn in turns.items() if not prompt.messages[index].tool_calls}
    return silent if len(silent) < len(turns) else {}


def _common_tokens(one: bytes, other: bytes) -> int:
    """Return how many tokens two packed texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other)) // _TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * _TOKEN_BYTES, middle * _TOKEN_BYTES)
        if one[part] == other[part]:
            low = middle
        else:
            high = middle - 1
    return low
