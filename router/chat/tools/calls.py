"""What an output is, piece by piece: text, and calls of tools. Readers of formats tell it what they find."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from kvhive.router.chat.messages import MAX_TOOL_CALLS, Tool
from kvhive.router.chat.tools.feed import Feed, NotACall
from kvhive.router.frontend import ToolCallDelta

CALL_ID_BYTES = 12
"""Random: no two calls that a conversation sees have the same id."""


def new_call_id() -> str:
    """Return an id that no other call has, spelled as OpenAI spells them."""
    return f"call_{secrets.token_hex(CALL_ID_BYTES)}"


class Calls:
    """Gathers what readers find. A call is `begin`, any arguments, `end`; whatever is no call is `text`."""

    def __init__(
        self,
        feed: Feed,
        tools: Mapping[str, Tool],
        most: int = MAX_TOOL_CALLS,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.feed = feed
        self.tools = tools
        self.begun = 0
        self.complete = 0
        self.most = most
        self._new_id = new_id
        self._found: list[str | ToolCallDelta] = []
        self._held = False  # whether the feed keeps what may turn out to be text
        self._streaming: int | None = None  # the number of what the feed keeps of it

    def text(self, text: str) -> None:
        """Say that this is no call."""
        if text:
            self._found.append(text)

    def hold(self) -> None:
        """Keep what is read from here on, as a call may begin here."""
        self.feed.keep()
        self._held = True

    def let_go(self) -> bool:
        """Go back to where the held text begins and tell so; False where what was read is a call's."""
        if self._streaming is not None:
            self.streamed()
        if self._held:
            self.feed.back()
            self._held = False
            return True
        return False

    def settle(self) -> None:
        """Count what was read as a call's, whatever comes."""
        if self._held:
            self.feed.kept()
            self._held = False

    def begin(self, name: str) -> None:
        """Begin a call: what was held is its. Raises NotACall where no such tool may be called."""
        if name not in self.tools or self.begun >= self.most:
            raise NotACall
        self.settle()
        self._found.append(ToolCallDelta(self.begun, self._new_id(), name))
        self.begun += 1

    def arguments(self, text: str) -> None:
        """Say more of the arguments of the call that was begun."""
        if text:
            self._found.append(ToolCallDelta(self.begun - 1, arguments=text))

    def stream(self) -> None:
        """Take all that is read from here on as arguments, as it comes."""
        self._streaming = self.feed.keep()

    def streamed(self) -> None:
        """End `stream`."""
        self.arguments(self.feed.kept())
        self._streaming = None

    def end(self) -> None:
        """End a call that is whole, and hold what follows: it may be another one, or text."""
        self.complete += 1
        self.hold()

    def take(self) -> list[str | ToolCallDelta]:
        """Return what was found since the last time."""
        if self._streaming is not None:
            self.arguments(self.feed.kept_so_far(self._streaming))
        found, self._found = self._found, []
        return found
