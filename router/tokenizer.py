"""Text to token ids and back, for whatever format the model's files have. No torch in this process.

A plain text that spells a control token becomes that token, as in transformers by default: a caller may
build any prompt. In a conversation only the template's own do; what its authors type stays text
(docs/conversations.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from kvhive.proto.block_hash import pack_tokens, unpack_tokens
from kvhive.proto.errors import InvalidRequest, ModelError
from kvhive.router.chat.control_text import ControlTokens
from kvhive.router.chat.messages import ChatMessage, Tool
from kvhive.router.chat.rendering import ChatRenderer
from kvhive.router.gguf_tokenizer import load_gguf_tokenizer
from kvhive.router.hf_tokenizer import load_hf_tokenizer
from kvhive.router.known_text import KnownText, PartlyKnown
from kvhive.router.text_joint import Joint, joint_of
from kvhive.router.tokenizer_parts import TokenizerParts


class TextTokenizer:
    """One model's tokenizer and chat template. Thread-safe; meant to be called in an executor."""

    def __init__(
        self, parts: TokenizerParts, template_timeout_s: float = 2.0, max_tokens: int | None = None
    ) -> None:
        """Wrap loaded parts. Raises ModelError when the chat template cannot be compiled.

        `max_tokens` is the longest prompt that can be served: a text that must exceed it is refused before
        the work of tokenising it (16 MB take 16 s and 2 GB).
        """
        self._tokenizer = parts.tokenizer
        self._renderer = (
            ChatRenderer(parts.chat_template, parts.special_tokens, template_timeout_s)
            if parts.chat_template is not None
            else None
        )
        self.chat_template = parts.chat_template
        """Jinja source, or None where the model has no chat format."""
        self.eos_token_ids = parts.eos_token_ids
        """Every id that ends the output of this model."""
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One more than the highest id that has a text."""
        added = self._tokenizer.get_added_tokens_decoder()
        self._skipped = frozenset(token_id for token_id, token in added.items() if token.special)
        self.control_tokens = ControlTokens(added[token_id].content for token_id in self._skipped)
        """What conversations may not spell."""
        self.joint = joint_of(self._tokenizer, min(self._skipped, default=None))
        """What stands before a text that is tokenised apart from the one before it; None: it cannot be."""
        self._typed = _all_text(self._tokenizer)
        self._known = KnownText(self._tokenizer)
        self._max_tokens = max_tokens
        self._longest_token_bytes = _longest_token_bytes(self._tokenizer)
        self._token_bytes: dict[int, bytes] = {}  # what was asked for; at most the vocabulary
        self._byte_values = _byte_level_alphabet() if _is_byte_level(self._tokenizer.decoder) else None

    @classmethod
    def load(
        cls, path: Path, template_timeout_s: float = 2.0, max_tokens: int | None = None
    ) -> TextTokenizer:
        """Load from a Hugging Face directory or a .gguf file. Raises ModelError; takes up to seconds."""
        if path.is_dir():
            return cls(load_hf_tokenizer(path), template_timeout_s, max_tokens)
        if path.suffix == ".gguf":
            return cls(load_gguf_tokenizer(path), template_timeout_s, max_tokens)
        raise ModelError(f"{path}: neither a directory nor a .gguf file")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text; `add_special_tokens` adds BOS or EOS where the model wants them.

        Raises InvalidRequest for a text that cannot fit into `max_tokens`.
        """
        return unpack_tokens(self.complete(self.look_up(text, add_special_tokens)))

    def look_up(
        self, text: str, add_special_tokens: bool, ended: bool = False, behind: bool = False
    ) -> PartlyKnown:
        """Begin to `encode`: cut the text, and look up what was tokenised before. Takes microseconds.

        `ended` says that the text will come again and end there, with something else behind it; `behind`
        that it stands behind other text.
        Raises InvalidRequest for a text that cannot fit into `max_tokens`.
        """
        self.check_length(text)
        if behind and self.joint is not None:
            return self._known.look_up(self.joint.text + text, False, ended, self.joint.tokens)
        return self._known.look_up(text, add_special_tokens, ended)

    def complete(self, text: PartlyKnown) -> bytes:
        """Tokenise the rest; return all ids as the wire carries them (`pack_tokens`)."""
        return self._known.complete(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; bytes that are not UTF-8 show as U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def encode_typed(self, text: str, behind: bool = False) -> bytes:
        """Return the packed ids of a text in which nothing is a control token."""
        joint = self.joint if behind and self.joint is not None else Joint()
        (encoding,) = self._typed.encode_batch_fast([joint.text + text], add_special_tokens=False)
        return pack_tokens(encoding.ids[joint.tokens :])

    def render_chat(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> str:
        """Return a conversation as the model's template writes it, ready for the assistant's turn.

        Raises InvalidRequest when the template refuses it or the model has none.
        """
        if self._renderer is None:
            raise InvalidRequest("messages", "the model has no chat template; send text or token ids")
        return self._renderer.render(messages, tools)

    @property
    def drops_thoughts(self) -> bool:
        """Whether the template leaves out what earlier turns thought, between <think> and </think>."""
        return self._renderer is not None and self._renderer.drops_thoughts

    def check_length(self, text: str) -> None:
        """Refuse a text that cannot fit into `max_tokens`. Raises InvalidRequest."""
        if self._max_tokens is None or self._longest_token_bytes is None:
            return
        least = len(text.encode()) // self._longest_token_bytes
        if least > self._max_tokens:
            raise InvalidRequest(
                "prompt",
                f"must have at most {self._max_tokens} tokens, has at least {least} ({len(text)} characters)",
            )

    def is_special(self, token_id: int) -> bool:
        """Whether a token controls the model and has no text in its output."""
        return token_id in self._skipped

    def special_token(self, text: str) -> int | None:
        """Return the id of the special token that is spelled so, if there is one."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._skipped else None

    def has_token(self, text: str) -> bool:
        """Whether one token is spelled so."""
        return self._tokenizer.token_to_id(text) is not None

    def token_name(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; ids beyond it are `<|id|>`."""
        return self._tokenizer.id_to_token(token_id) or f"<|{token_id}|>"

    @property
    def is_byte_level(self) -> bool:
        """Whether every token is a fixed string of bytes (`token_bytes`), whatever stands beside it."""
        return self._byte_values is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to decoded text; empty for special and unknown ids.

        Only for byte-level tokenizers.
        """
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._spelled(token_id)
            if token_id < self.vocab_size:
                self._token_bytes[token_id] = found
        return found

    def _spelled(self, token_id: int) -> bytes:
        assert self._byte_values is not None
        if token_id in self._skipped:
            return b""
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes([self._byte_values[character] for character in token])
        except KeyError:  # an added token, spelled as plain text
            return token.encode()


def _longest_token_bytes(tokenizer: Tokenizer) -> int | None:
    """Return the most bytes of text that one token can stand for; None where it has no limit.

    A normalizer may shorten a text and an added token may swallow the white space beside it.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    if not _is_byte_level(tokenizer.decoder) or tokenizer.normalizer is not None:
        return None
    if any(token.lstrip or token.rstrip for token in added):
        return None
    # A character of the byte-level alphabet is one byte of text; an added token is at most its own UTF-8.
    words = [len(word) for word in tokenizer.get_vocab(with_added_tokens=False)]
    return max([*words, *(len(token.content.encode()) for token in added)], default=1)


def _all_text(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer for which control tokens are text. It shares the vocabulary, which may be large."""
    other = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        other.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        other.pre_tokenizer = tokenizer.pre_tokenizer
    added = tokenizer.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        other.add_tokens([token])
    if other.get_added_tokens_decoder().keys() != added.keys():
        other = Tokenizer.from_str(tokenizer.to_str())
    other.encode_special_tokens = True
    return other


def _is_byte_level(decoder: object) -> bool:
    return type(decoder).__name__ == "ByteLevel"


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of the byte-level alphabet stands for (GPT-2's `bytes_to_unicode`).

    Printable Latin-1 stands for itself; the other bytes, in order, take the characters from U+0100 on.
    """
    alphabet = set(ByteLevel.alphabet())
    plain = [byte for byte in range(256) if chr(byte) in alphabet]
    moved = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(moved)}
