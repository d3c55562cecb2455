"""Where a text may be cut so that its words, tokenised one by one, give the ids of the whole.

That is before a space that follows a visible character, for vocabularies of which all this holds:

- The pre-tokenizer splits there, whatever stands around it. It is made of alternatives in none of which a
  space follows a visible character, and `\\s+` takes a space that no other does. None looks behind; the one
  that looks ahead does so after white space, with which no word ends. So both sides are split as they are
  alone.
- The model, BPE without dropout, takes each of what it is given by itself.
- No added token, which is found before, has such a place inside, or depends on what stands beside it.
- The normalizer is none, or NFC, which joins nothing to a space.

For any other vocabulary, nothing is cut.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC

PASSAGE_CHARS = 256
"""Fewest characters of a passage but the last."""

_WORD_END = re.compile(r"[!-~\w](?= )")
_SENTENCE_END = re.compile(r"[.:!?](?= )")
_PLACE_INSIDE = re.compile(r"\S ")
_KNOWN_ALTERNATIVES = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
"""Of the pre-tokenizers of Llama 3, Qwen, Tekken and gpt-oss. GPT-2's is ByteLevel's own."""


def passages(text: str) -> list[str]:
    """Cut a text into passages: equal beginnings are cut alike, but for their last passage.

    Preferably where a sentence ends: so texts that share all but their beginning soon fall into step.
    """
    found, start = [], 0
    while True:
        least = start + PASSAGE_CHARS - 1
        end = _SENTENCE_END.search(text, least, least + PASSAGE_CHARS) or _WORD_END.search(text, least)
        if end is None:
            found.append(text[start:])
            return found
        found.append(text[start : end.end()])
        start = end.end()


def ends_visibly(part: str) -> bool:
    """Tell whether a text may be cut before the space that follows this part of it."""
    end = part[-1:]
    return end.isalnum() or "!" <= end <= "~"


def may_be_cut(tokenizer: Tokenizer) -> bool:
    """Tell whether cutting a vocabulary's texts is proven to change nothing (see above)."""
    model, normalizer = tokenizer.model, tokenizer.normalizer
    return (
        isinstance(model, BPE)
        and not model.dropout
        and (normalizer is None or isinstance(normalizer, NFC))
        and tokenizer.pre_tokenizer is not None
        and _splits(json.loads(tokenizer.pre_tokenizer.__getstate__()))
        and not any(map(_is_in_the_way, tokenizer.get_added_tokens_decoder().values()))
    )


def _splits(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Tell whether a pre-tokenizer has a step that splits at every cut, and no step that minds one."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    if any(step["type"] == "ByteLevel" for step in steps[:-1]):  # what follows it sees no spaces any more
        return False
    found = [_step_splits(step) for step in steps]
    return None not in found and True in found


def _step_splits(step: Mapping[str, Any]) -> bool | None:
    """Tell whether a step splits at every cut; None where it is not known to leave both sides as they are."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(split)}:
            return split
        case {"type": "Digits"}:  # next to each other, or each: never with a space
            return False
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            alternatives = _alternatives(pattern)
            return None if alternatives is None else r"\s+" in alternatives
    return None


def _alternatives(pattern: str) -> Sequence[str] | None:
    """Return the known alternatives that a pattern consists of; None where there is another one."""
    found: list[str] = []
    rest = pattern + "|"
    while rest:
        known = next((each for each in _KNOWN_ALTERNATIVES if rest.startswith(each + "|")), None)
        if known is None:
            return None
        found.append(known)
        rest = rest[len(known) + 1 :]
    return found


def _is_in_the_way(token: AddedToken) -> bool:
    spelled = token.content, unicodedata.normalize("NFC", token.content)
    return token.lstrip or token.rstrip or token.single_word or any(map(_PLACE_INSIDE.search, spelled))
