"""Turns a request's input into token ids and block keys, once, off the event loop."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import Executor
from dataclasses import dataclass

from kvhive.proto.block_chain import chain_keys
from kvhive.proto.block_hash import BlockHash, BlockKey, namespace_extras, pack_tokens
from kvhive.router.request import ChatPrompt, GenerateRequest, Prompt, TextPrompt, TokenPrompt
from kvhive.router.tokenizer import TextTokenizer

HOME_BLOCKS = 8
"""A cold prompt's home is named by its first 8 blocks: enough to tell system prompts apart, few enough that
different questions behind one system prompt meet."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as the router routes it and the worker computes it."""

    token_ids: tuple[int, ...]
    packed: bytes
    """The token ids as the wire carries them."""
    keys: tuple[BlockKey, ...]
    """Index keys of the full blocks."""
    home_key: bytes
    keyed: bool
    """Whether home_key is a cache_key of the caller's."""


class PromptPreparer:
    """Tokenises and hashes for one model. `prepare` runs in the given executor."""

    def __init__(
        self, tokenizer: TextTokenizer, root: BlockHash, block_size: int, executor: Executor
    ) -> None:
        self._tokenizer = tokenizer
        self._root = root
        self._block_size = block_size
        self._executor = executor

    async def prepare(self, request: GenerateRequest) -> PreparedPrompt:
        """Tokenise and hash. Raises InvalidRequest when the chat template refuses the messages."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._prepare, request)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Tokenise only."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._tokens, prompt)

    def _tokens(self, prompt: Prompt) -> list[int]:
        match prompt:
            case TextPrompt(text):
                return self._tokenizer.encode(text, add_special_tokens=True)
            case TokenPrompt(token_ids):
                return list(token_ids)
            case ChatPrompt(messages):
                return self._tokenizer.encode_chat(messages)

    def _prepare(self, request: GenerateRequest) -> PreparedPrompt:
        tokens = self._tokens(request.prompt)
        extras = namespace_extras(request.cache_salt)
        packed = pack_tokens(tokens)
        keys = chain_keys(self._root, packed, self._block_size, extras)
        keyed = bool(request.cache_key)
        if keyed:
            named = b"key" + extras + b"|" + request.cache_key.encode()
        elif keys:
            named = b"blocks" + keys[:HOME_BLOCKS][-1]
        else:
            named = b"tokens" + extras + b"|" + packed
        return PreparedPrompt(tuple(tokens), packed, keys, hashlib.blake2b(named).digest(), keyed)
