"""Conversations for tests: their ids, and what is answered to them, as the router hears it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvhive.proto.block_hash import unpack_tokens
from kvhive.router.chat.answers import Answer, Answers
from kvhive.router.chat.conversation import Conversations
from kvhive.router.chat.messages import ChatMessage, ChatPrompt
from kvhive.router.frontend import Delta, Finished, ToolCallDelta
from kvhive.router.output_text import OutputText
from kvhive.router.tokenizer import TextTokenizer


def encode_chat(tokenizer: TextTokenizer, messages: Sequence[ChatMessage]) -> list[int]:
    """Return the ids of a conversation of which nothing is known."""
    return unpack_tokens(Conversations(tokenizer).encode(ChatPrompt(tuple(messages)))[0])


class Talk:
    """A router's side of conversations, without a router."""

    def __init__(self, tokenizer: TextTokenizer, ends: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.ends = {*tokenizer.eos_token_ids, *ends}
        self.conversations = Conversations(tokenizer)

    def ids(self, prompt: ChatPrompt, salt: str = "") -> list[int]:
        """Return the ids of a prompt."""
        return unpack_tokens(self.conversations.encode(prompt, salt)[0])

    def answered(
        self,
        prompt: ChatPrompt,
        token_ids: Sequence[int],
        stops: Sequence[str] = (),
        calls: Sequence[ToolCallDelta] = (),
        salt: str = "",
    ) -> tuple[ChatMessage, list[int]]:
        """Let a model answer with these ids; return what the client hears, and the ids that counted."""
        packed, _ = self.conversations.encode(prompt, salt)
        heard: list[Answer] = []
        answers = Answers(heard.append)
        output = OutputText(self.tokenizer, stops)
        for token in token_ids:
            text, taken = output.push([token])
            answers.take(Delta("" if calls else text, taken))
            if output.stopped:
                break
        rest = output.finish()
        answers.take(Delta("" if calls else rest, tool_calls=tuple(calls)))
        answers.take(Finished("stop", None))
        (answer,) = heard
        self.conversations.remember(prompt, salt, packed, answer, self.ends)
        return answer.message(), answer.token_ids
