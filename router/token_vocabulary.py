"""What each token of a tokenizer stands for, as grammars need it."""

from __future__ import annotations

from kvhive.proto.token_vocabulary import TokenVocabulary
from kvhive.router.token_piece import token_piece
from kvhive.router.tokenizer import TextTokenizer


def token_vocabulary(tokenizer: TextTokenizer) -> TokenVocabulary:
    """Return the vocabulary; takes some 0.2 s per 50,000 tokens.

    Where it is not byte-level, a token at the very start of an output may have a space here that the text
    leaves out: a grammar that wants one there gets it, and its reader does not.
    """
    tokens: list[bytes] = []
    special: list[int] = []
    for token_id in range(tokenizer.vocab_size):
        data = token_piece(tokenizer, token_id).data
        if not data:  # it controls the model, or nothing bears this number
            special.append(token_id)
            data = tokenizer.token_name(token_id).encode()
        tokens.append(data)
    ends = sorted(end for end in tokenizer.eos_token_ids if end < len(tokens))
    return TokenVocabulary(tuple(tokens), tuple(special), tuple(ends))
