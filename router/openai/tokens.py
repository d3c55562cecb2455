"""POST /tokenize and /detokenize, in vLLM's shapes: what a prompt is in tokens, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.messages import ChatPrompt
from kvhive.router.frontend import ModelInfo, TokenizingFrontend, TokenPiece
from kvhive.router.json_fields import typed
from kvhive.router.openai.chat_messages import read_messages
from kvhive.router.openai.chat_request import spell_chat_field
from kvhive.router.openai.chat_tools import read_tools
from kvhive.router.openai.field_policy import given_fields
from kvhive.router.openai.text_request import token_ids
from kvhive.router.request import Prompt, TextPrompt

SPELLED_AT_ONCE = 1024
"""Tokens that are spelled before others have their turn on the event loop."""
OBEYED = frozenset({"model", "prompt", "messages", "tools", "tool_choice", "cache_salt", "return_token_strs"})
NEUTRAL_WITH_PROMPT: Mapping[str, tuple[object, ...]] = {"add_special_tokens": (True,)}
NEUTRAL_WITH_MESSAGES: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """What is to become tokens."""

    prompt: Prompt
    model: str
    cache_salt: str
    spelled: bool
    """Whether each token is to be shown as text, too."""
    ignored: tuple[str, ...]
    """Fields that changed nothing."""

    def spell(self, field: str) -> str:
        """Name a field of the internal request as this body calls it."""
        if isinstance(self.prompt, ChatPrompt):
            return spell_chat_field(field)
        return "prompt" if field == "text" else field


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """What is to become text."""

    token_ids: tuple[int, ...]
    model: str
    ignored: tuple[str, ...]


def parse_tokenize(body: dict[str, Any]) -> TokenizeRequest:
    """Read a parsed JSON body: with `messages` a conversation, else a text. Raises InvalidRequest."""
    chat = body.get("messages") is not None
    given = given_fields(body, OBEYED, NEUTRAL_WITH_MESSAGES if chat else NEUTRAL_WITH_PROMPT)
    model: str = typed(given, "model", str, "")
    salt: str = typed(given, "cache_salt", str, "")
    spelled: bool = typed(given, "return_token_strs", bool, False)
    for name in ("prompt",) if chat else ("tools", "tool_choice"):
        if name in given:
            raise InvalidRequest(name, f"must not be given with{'' if chat else 'out'} messages")
    if chat:
        tools, choice = read_tools(given)
        prompt = ChatPrompt(read_messages(given).messages, tools, choice)
        return TokenizeRequest(prompt, model, salt, spelled, given.ignored)
    if "prompt" not in given:
        raise InvalidRequest("prompt", "is required, or messages")
    text = TextPrompt(typed(given, "prompt", str, ""))
    return TokenizeRequest(text, model, salt, spelled, given.ignored)


def parse_detokenize(body: dict[str, Any]) -> DetokenizeRequest:
    """Read a parsed JSON body. Raises InvalidRequest."""
    given = given_fields(body, frozenset({"model", "tokens"}), {})
    if "tokens" not in given:
        raise InvalidRequest("tokens", "is required")
    ids = token_ids("tokens", typed(given, "tokens", list, []))
    return DetokenizeRequest(ids, typed(given, "model", str, ""), given.ignored)


async def tokenized(frontend: TokenizingFrontend, asked: TokenizeRequest, model: ModelInfo) -> dict[str, Any]:
    """Return the answer of /tokenize. Raises InvalidRequest in the words of the body, Overloaded."""
    try:
        ids = await frontend.tokenize(asked.prompt, asked.model, asked.cache_salt)
    except InvalidRequest as error:
        raise InvalidRequest(asked.spell(error.field), error.problem) from error
    texts = await _spelled(ids, frontend.token_piece) if asked.spelled else None
    return {"count": len(ids), "max_model_len": model.max_context, "tokens": ids, "token_strs": texts}


async def _spelled(ids: Sequence[int], piece: Callable[[int], TokenPiece]) -> list[str]:
    texts: list[str] = []
    for start in range(0, len(ids), SPELLED_AT_ONCE):
        texts += [piece(token_id).text for token_id in ids[start : start + SPELLED_AT_ONCE]]
        await asyncio.sleep(0)
    return texts
