"""How a worker learns what its tokens stand for: as the router reads it from the model's files."""

from __future__ import annotations

from pathlib import Path

from kvhive.proto.token_vocabulary import TokenVocabulary
from kvhive.router.token_vocabulary import token_vocabulary
from kvhive.router.tokenizer import TextTokenizer


def load_vocabulary(model_path: str) -> TokenVocabulary:
    """Implements VocabularyLoader. Raises ModelError."""
    return token_vocabulary(TextTokenizer.load(Path(model_path)))
