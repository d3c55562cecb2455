"""How a family of models writes calls of tools: the contract of a format. One file each, all in by_name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvhive.router.chat.tools.calls import Calls
from kvhive.router.chat.tools.feed import Reading

MAX_NAME_CHARS = 256
"""Of what may be a tool's name; more is text."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """How calls with JSON arguments are spelled; what a reader must take, and a grammar may enforce."""

    before: str
    """... the name."""
    between: str
    """... the name and the arguments."""
    after: str
    """... the arguments."""
    opens: str = ""
    """Before the first call."""
    joins: str = ""
    """Between two calls."""
    closes: str = ""
    """After the last call."""
    json_name: bool = True
    """Whether the name stands inside a JSON string."""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """One format.

    `read` is called with the feed at an opener, held, and reads one or more calls. It raises NotACall where
    the text is none; what is held then is text. It returns after a whole call, or several.
    """

    name: str
    read: Callable[[Calls], Reading[None]]
    shape: CallShape
    """As a grammar enforces them."""
    enforced: ToolForm | None = None
    """Where a grammar enforces them in another format, which is read then; None: in this one."""
    openers: tuple[str, ...] = ()
    """What calls begin with, wherever in an output; none is the beginning of another one."""
    leading: tuple[str, ...] = ()
    """What they begin with at the very start of an output, but for white space."""
    markers: tuple[str, ...] = ()
    """Special tokens that are part of the format, in vocabularies that have them."""
