"""Requests whose answers follow a grammar, on tiny models."""

from __future__ import annotations

import json
from collections.abc import Iterable

from grammar_vocabulary import TINY
from real_engine import VOCABULARY, request

from kvhive.proto.grammar import new_matcher
from kvhive.proto.token_vocabulary import make_tokenizer
from kvhive.worker.output_matcher import OutputMatcher
from kvhive.worker.sequence import Grammar, Sequence

FINISHING = tuple((ord(letter), 3.0) for letter in '"]}')
"""A bias that makes random weights come to an end of what they say."""


def matcher(kind: str, text: str | object) -> OutputMatcher:
    """Compile a grammar; a schema may be given as what it is."""
    text = text if isinstance(text, str) else json.dumps(text)
    inner = new_matcher(make_tokenizer(TINY), kind, text)
    return OutputMatcher(inner, len(TINY.tokens), frozenset(TINY.ends))


def following(
    name: str, tokens: Iterable[int], max_tokens: int, kind: str, text: str | object, **sampling: object
) -> Sequence:
    """A request whose answer follows a grammar; it ends by the model's own ends unless told otherwise."""
    options = {"stop_token_ids": frozenset(TINY.ends), "grammar": Grammar(kind, str(text)), **sampling}
    seq = request(name, tokens, max_tokens, **options)  # type: ignore[arg-type]
    seq.matcher = matcher(kind, text)
    return seq


def two_choices(name: str, schema: object, max_tokens: int) -> list[Sequence]:
    """Two choices at temperature 1 that follow a schema, as a router asks. Raises InvalidRequest."""
    options = {"temperature": 1.0, "seed": len(name), "logit_bias": FINISHING}
    return [
        following(
            f"{name}/{choice}", range(40, 60), max_tokens, "json_schema", schema, choice=choice, **options
        )
        for choice in range(2)
    ]


def spoken(tokens: Iterable[int]) -> str:
    """The text of tokens, without ends. Raises where it is no UTF-8, or has a token that is no text."""
    kept = [token for token in tokens if token not in TINY.ends]
    assert not set(kept) & set(TINY.special) and max(kept, default=0) < len(TINY.tokens) <= VOCABULARY
    return b"".join(TINY.tokens[token] for token in kept).decode()
