"""How the served model uses tools: what its output must be, and how calls are read out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.messages import ChatPrompt, Tool
from kvhive.router.chat.tools.form import ToolForm
from kvhive.router.chat.tools.grammar import checked_parameters, joinable, schema_grammar, tool_grammar
from kvhive.router.chat.tools.parser import ToolCallParser
from kvhive.router.request import GenerateRequest
from kvhive.router.sampling_params import Grammar
from kvhive.router.tokenizer import TextTokenizer

OFF_LOOP_CHARS = 64 * 1024
"""Of all tools' parameters; more are read in a thread."""
OFF_LOOP_ENFORCED_CHARS = 4 * 1024
"""... where they become a grammar, which takes ten times as long."""


@dataclass(frozen=True, slots=True)
class ToolReading:
    """How one request's outputs are read: a parser for each."""

    form: ToolForm
    tools: Mapping[str, Tool]
    parallel: bool
    shown: Mapping[int, str]
    """Special tokens of the format, which are to be text for the parser."""

    def parser(self) -> ToolCallParser:
        """Return a new parser."""
        return ToolCallParser(self.form, self.tools, self.parallel)


class ToolUse:
    """One per router."""

    def __init__(
        self,
        form: ToolForm | None,
        tokenizer: TextTokenizer,
        check: Callable[[Grammar], Awaitable[None]],
    ) -> None:
        """`form` is the model's format; with None, no calls are found, nor can any be required.

        `check` raises InvalidRequest for a grammar that no worker could follow.
        """
        self._form = form
        self._tokenizer = tokenizer
        self._check = check

    async def prepare(self, request: GenerateRequest) -> tuple[GenerateRequest, ToolReading | None]:
        """Return the request with the grammar that its tool_choice takes, and how its outputs are read.

        None: as plain text. Raises InvalidRequest for tools whose parameters are no JSON Schema of an object,
        or one that cannot be enforced where it must be.
        """
        prompt = request.prompt
        if not isinstance(prompt, ChatPrompt) or not prompt.tools:
            return request, None
        enforced = prompt.tool_choice.mode == "required" or request.sampling.grammar is not None
        most = OFF_LOOP_ENFORCED_CHARS if enforced else OFF_LOOP_CHARS
        if sum(len(tool.parameters) for tool in prompt.tools) > most:
            prepared = await asyncio.to_thread(self._prepare, request, prompt)
        else:
            prepared = self._prepare(request, prompt)
        grammar = prepared[0].sampling.grammar
        if grammar is not None and prepared[1] is not None:
            await self._try(grammar, prompt)
        return prepared

    async def _try(self, grammar: Grammar, prompt: ChatPrompt) -> None:
        """See whether calls can be enforced. Raises InvalidRequest naming the tool that cannot."""
        try:
            await self._check(grammar)
        except InvalidRequest:
            for index, tool in enumerate(prompt.tools):
                field = f"tools[{index}].parameters"
                try:
                    await self._check(schema_grammar(field, tool.parameters))
                except InvalidRequest as error:
                    raise InvalidRequest(field, str(error).partition(": ")[2]) from error
            raise

    def _prepare(
        self, request: GenerateRequest, prompt: ChatPrompt
    ) -> tuple[GenerateRequest, ToolReading | None]:
        for index, tool in enumerate(prompt.tools):
            checked_parameters(f"tools[{index}].parameters", tool.parameters)
        choice, form, given = prompt.tool_choice, self._form, request.sampling.grammar
        if choice.mode == "none" or (form is None and choice.mode == "auto"):
            return request, None
        if form is None:
            raise InvalidRequest("tool_choice", "requires a call, but router.tool_format is none here")
        enforced = choice.mode == "required" or given is not None
        if enforced:
            form = form.enforced or form
            grammar = self._grammar(form, prompt, given)
            request = replace(request, sampling=replace(request.sampling, grammar=grammar))
        callable_ = {tool.name: tool for tool in prompt.tools if choice.name in ("", tool.name)}
        return request, ToolReading(form, callable_, choice.parallel, self._shown(form))

    def _grammar(self, form: ToolForm, prompt: ChatPrompt, given: Grammar | None) -> Grammar:
        otherwise = given if prompt.tool_choice.mode == "auto" else None  # else the answer is calls alone
        if otherwise is not None:
            joinable(form, otherwise)
        return tool_grammar(form, prompt.tools, prompt.tool_choice, self._tokenizer.special_token, otherwise)

    def _shown(self, form: ToolForm) -> dict[int, str]:
        ids = {marker: self._tokenizer.special_token(marker) for marker in form.markers}
        return {token_id: marker for marker, token_id in ids.items() if token_id is not None}
