"""Turns a request's input into token ids and block keys, once; off the event loop, unless that is short."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvhive.proto.block_chain import chain_keys
from kvhive.proto.block_hash import BlockHash, BlockKey, namespace_extras, pack_tokens, unpack_tokens
from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.answers import Answer, Answers
from kvhive.router.chat.conversation import Conversations, MarkedChat
from kvhive.router.chat.messages import ChatPrompt
from kvhive.router.known_text import PartlyKnown
from kvhive.router.request import GenerateRequest, Prompt, PromptPin, TextPrompt, TokenPrompt
from kvhive.router.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")

HOME_BLOCKS = 8
"""A cold prompt's home is named by its first 8 blocks: enough to tell system prompts apart, few enough that
different questions behind one system prompt meet."""

SHORT_CHARS, SHORT_MESSAGES = 16 * 1024, 32
"""Of a prompt that is rendered and looked up on the event loop: some 0.1 ms."""
UNKNOWN_CHARS = 2048
"""Of these, what may be tokenised there, too: 0.5 ms, where a thread costs 0.2, and the wait for its turn."""
SHORT_ANSWER = 512
"""Tokens of an answer to a short prompt that is remembered on the event loop: 0.3 ms, or 1 (stop string)."""
SLOW_S, SLOW_IN_A_ROW = 0.05, 3
"""Of CPU for a chat: a model whose template takes longer so often has it rendered in threads from then on."""


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
    pins: tuple[PromptPin, ...] = ()
    """What is to stay cached, in the order that it was asked for; each says of how many tokens."""


class PromptPreparer:
    """Tokenises and hashes for one model. `prepare` runs in the given executor."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        root: BlockHash,
        block_size: int,
        executor: Executor,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._cpu_clock = cpu_clock
        self._slow_templates = 0  # in a row
        self._tokenizer = tokenizer
        self._conversations = Conversations(tokenizer)
        self._root = root
        self._block_size = block_size
        self._executor = executor

    async def prepare(self, request: GenerateRequest) -> PreparedPrompt:
        """Tokenise and hash. Raises InvalidRequest when the chat template refuses the messages."""
        chat = isinstance(request.prompt, ChatPrompt)
        if not _is_short(request.prompt) or (chat and self._slow_templates >= SLOW_IN_A_ROW):
            return await self._off_loop(
                lambda: self._hashed(request, self._begun(request.prompt, request.cache_salt))
            )
        began = self._cpu_clock()
        try:
            begun = self._begun(request.prompt, request.cache_salt)
        finally:
            if chat:
                self._note_template(self._cpu_clock() - began)
        if begun.unknown_chars > UNKNOWN_CHARS:
            return await self._off_loop(lambda: self._hashed(request, begun))
        return self._hashed(request, begun)

    async def tokenize(self, prompt: Prompt, cache_salt: str = "") -> list[int]:
        """Tokenise only, as `prepare` does."""
        return await self._off_loop(
            lambda: unpack_tokens(self._conversations.complete(self._begun(prompt, cache_salt))[0])
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return await self._off_loop(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _note_template(self, seconds: float) -> None:
        """A template that is slow several times in a row is rendered in threads from then on."""
        if seconds <= SLOW_S:
            self._slow_templates = 0
            return
        self._slow_templates += 1
        if self._slow_templates == SLOW_IN_A_ROW:
            log.warning("the chat template is slow, it is rendered in threads now cpu_s=%.3f", seconds)

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def answers(self, request: GenerateRequest, prompt: PreparedPrompt) -> Answers | None:
        """Return who is to hear what a conversation is answered, so that its next turn finds the same ids."""
        said = request.prompt
        if not isinstance(said, ChatPrompt):
            return None
        ends = {*self._tokenizer.eos_token_ids, *request.sampling.stop_token_ids}

        def ended(answer: Answer) -> None:
            remember = partial(
                self._conversations.remember, said, request.cache_salt, prompt.packed, answer, ends
            )
            if len(answer.token_ids) <= SHORT_ANSWER and _is_short(said):
                remember()
            else:
                self._executor.submit(remember)

        return Answers(ended)

    def _begun(self, prompt: Prompt, salt: str) -> PartlyKnown | MarkedChat:
        match prompt:
            case TextPrompt(text):
                return self._tokenizer.look_up(text, add_special_tokens=True)
            case TokenPrompt(token_ids):
                return PartlyKnown([("", [pack_tokens(token_ids)])])
            case ChatPrompt():
                return self._conversations.begin(prompt, salt)

    def _hashed(self, request: GenerateRequest, begun: PartlyKnown | MarkedChat) -> PreparedPrompt:
        packed, ends = self._conversations.complete(begun)
        extras = namespace_extras(request.cache_salt)
        keys = chain_keys(self._root, packed, self._block_size, extras)
        keyed = bool(request.cache_key)
        if keyed:
            named = b"key" + extras + b"|" + request.cache_key.encode()
        elif keys:
            named = b"blocks" + keys[:HOME_BLOCKS][-1]
        else:
            named = b"tokens" + extras + b"|" + packed
        token_ids, home_key = tuple(unpack_tokens(packed)), hashlib.blake2b(named).digest()
        pins = _pins(request.pins, len(token_ids))
        if isinstance(request.prompt, ChatPrompt):
            points = request.prompt.breakpoints
            pins = tuple(PromptPin(point.ttl_s, end) for point, end in zip(points, ends, strict=True))
        return PreparedPrompt(token_ids, packed, keys, home_key, keyed, pins)


def _pins(pins: Sequence[PromptPin], prompt_tokens: int) -> tuple[PromptPin, ...]:
    """Say of each pin how many tokens it is of. Raises InvalidRequest."""
    for index, pin in enumerate(pins):
        if pin.tokens is not None and pin.tokens > prompt_tokens:
            raise InvalidRequest(
                f"pins[{index}].tokens",
                f"must be at most the prompt's {prompt_tokens} tokens, is {pin.tokens}",
            )
    return tuple(PromptPin(pin.ttl_s, pin.tokens or prompt_tokens) for pin in pins)


def _is_short(prompt: Prompt) -> bool:
    match prompt:
        case TextPrompt(text):
            return len(text) <= SHORT_CHARS
        case TokenPrompt(token_ids):
            return len(token_ids) <= SHORT_CHARS
        case ChatPrompt(messages, tools):
            if len(messages) > SHORT_MESSAGES:
                return False
            chars = 0
            for message in messages:
                chars += len(message.content) + len(message.tool_call_id)
                for call in message.tool_calls:
                    chars += len(call.id) + len(call.name) + len(call.arguments)
            for tool in tools:
                chars += len(tool.name) + len(tool.description) + len(tool.parameters)
            return chars <= SHORT_CHARS
