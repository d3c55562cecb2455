"""Text that stands behind other text, tokenised apart from it.

Vocabularies of SentencePiece's kind put a space before what they are given, which is right for a whole text
only. So such a piece is tokenised behind a character that joins nothing, whose own ids are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

_CHARACTERS = "\x01\x02\x03\x04\ue000\uf8ff"
_PIECES = ("a", " a", "\n", "\na", ".", "1", "é")


@dataclass(frozen=True, slots=True)
class Joint:
    """What is put before a piece."""

    text: str = ""
    tokens: int = 0
    """Ids that it makes."""
    behind_control: bool = False
    """Whether it is needed behind a control token, too: there, some put no space either."""


def joint_of(tokenizer: Tokenizer, control: int | None) -> Joint | None:
    """Return a vocabulary's joint, an empty one where none is needed; None where it needs one and has none.

    `control` is the id of any of its control tokens.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    words = tokenizer.get_vocab(with_added_tokens=True)
    unknown = getattr(tokenizer.model, "unk_token", None)
    for character in _CHARACTERS:
        before = ids(character)
        if not before or (unknown is not None and words.get(unknown) in before):  # unknown ones may fuse
            continue
        if any(character in word and word not in (character, "▁" + character) for word in words):
            continue
        behind = [ids(character + piece) for piece in _PIECES]
        if any(found[: len(before)] != before for found in behind):
            continue
        if all(f[len(before) :] == ids(p) for f, p in zip(behind, _PIECES, strict=True)):
            return Joint()
        spelled = None if control is None else tokenizer.id_to_token(control)
        first = spelled is not None and ids(spelled + "a") == [control, *behind[0][len(before) :]]
        return Joint(character, len(before), first)
    return Joint() if ids("a") == ids("\na")[-len(ids("a")) :] else None
