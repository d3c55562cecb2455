"""A model's chat template, rendered in a sandbox.

The template's source comes from the model's files only, never from a request. Rendering is bounded: a
deadline is checked at every piece of output, attribute, item and call; ranges, products and the output
have size limits. That stops accidents, not malice: a loop that does none of these cannot be interrupted
inside a thread, and text joined in a variable or padded by a filter is not measured. So a model's files
are trusted as far as their template goes, and a model from an unknown source is looked at first.

The environment's options, globals and filters are those of transformers' `apply_chat_template`, whose
output is the tests' oracle.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvhive.proto.errors import InvalidRequest, ModelError

MAX_RENDERED_CHARS = 64 * 1024 * 1024
"""Four times the largest request body by default: a template that inflates more than that is broken."""
MAX_PRODUCT = 1_000_000
"""Largest result of `text * n` and largest exponent in a template."""


class ChatTemplate:
    """A compiled chat template. Thread-safe."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`; `now` is the wall clock that `strftime_now` shows. Raises ModelError."""
        self._environment = _BoundedEnvironment(clock)
        self._environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        self._special_tokens = dict(special_tokens)
        self._timeout_s = timeout_s
        try:
            self._template = self._environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(self._environment.parse(source)))
            """What it reads."""
        except TemplateError as error:
            raise ModelError(f"the model's chat template cannot be compiled: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None = None
    ) -> str:
        """Return the conversation as text, ending where the assistant's next turn begins.

        Messages and tools are as transformers hands them on (rendering.py). Raises InvalidRequest("messages")
        with the template's own words where it refuses the conversation, or when it takes longer than the
        timeout.
        """
        token = self._environment.deadline.set(self._environment.clock() + self._timeout_s)
        try:
            return self._join(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest("messages", f"refused by the model's chat template: {error}") from error
        finally:
            self._environment.deadline.reset(token)

    def _join(self, **variables: object) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(**variables):
            self._environment.check_deadline()
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise TemplateError(f"the rendered text exceeds {MAX_RENDERED_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; for serving it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a deadline per render, kept per thread in a context variable."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.clock = clock
        self.deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception

    def check_deadline(self) -> None:
        if self.clock() > self.deadline.get():
            raise TemplateError("rendering took too long")

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_deadline()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_deadline()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.check_deadline()
        if operator == "**" and isinstance(right, int) and right > 64:
            raise TemplateError("an exponent is too large")
        for sequence, count in ((left, right), (right, left)):
            repeats = isinstance(sequence, (str, list, tuple)) and isinstance(count, int)
            if repeats and len(sequence) * count > MAX_PRODUCT:
                raise TemplateError("a product is too large")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's filter of this name, which escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
