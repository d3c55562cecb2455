"""From what a model generated to what may be put into the next prompt in its place."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvhive.proto.block_hash import pack_tokens
from kvhive.router.chat.answers import Answer
from kvhive.router.chat.known_turns import KnownTurn
from kvhive.router.chat.messages import ChatMessage
from kvhive.router.detokenizer import IncrementalDetokenizer
from kvhive.router.tokenizer import TextTokenizer

MOST_STEPS_BACK = 8
"""Tokens before a cut that may hold parts of one character."""


def generated_turn(
    tokenizer: TextTokenizer, answer: Answer, turn: ChatMessage, ends: Collection[int], after: bytes
) -> KnownTurn | None:
    """Return the ids that stand for an answer's text and calls; None where none do.

    `ends` are the ids that end a turn, of which the last one is the template's business. A stop string ends
    a text before its last ids do: then those count that lie in the text, and the rest is text. A rest that
    spells a control token would become one, so such a turn is not remembered.
    """
    ids = list(answer.token_ids)
    if ids and ids[-1] in ends and tokenizer.is_special(ids[-1]):
        ids.pop()
    rest = ""
    if turn.tool_calls:
        if answer.stop:  # what of the ids is behind the last call cannot be told
            return None
    elif tokenizer.decode(ids) != turn.content:
        count, rest = _cut(tokenizer, ids, turn.content)
        if tokenizer.control_tokens.typed_in(rest):
            return None
        ids = ids[:count]
    return KnownTurn(after, pack_tokens(ids), rest) if ids else None


def _cut(tokenizer: TextTokenizer, ids: Sequence[int], text: str) -> tuple[int, str]:
    """Return how many of the ids a text begins with, and what of it follows them."""
    detokenizer, done = IncrementalDetokenizer(tokenizer), 0
    places = [(0, 0)]
    for count, token in enumerate(ids, start=1):
        piece = detokenizer.push([token])
        if not text.startswith(piece, done):
            break
        done += len(piece)
        if piece:
            places.append((count, done))
    else:
        if text[done:] == detokenizer.flush():  # decoded at once, bytes that are no character may differ
            return len(ids), ""
    for count, chars in places[: -MOST_STEPS_BACK - 1 : -1]:
        if tokenizer.decode(ids[:count]) == text[:chars]:  # and no character is begun
            return count, text[chars:]
    return 0, text
