"""What a long start shows: live lines on a terminal, one plain line per change in a pipe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

_PLAIN_EVERY_S = 2.0
"""In a pipe, a subject's changing text is written at most this often."""


class Progress(Protocol):
    """Says what each subject (Ray, a worker, the router) is doing now."""

    def __call__(self, subject: str, text: str) -> None:
        """Report; the same text again shows nothing new."""
        ...


class PlainProgress:
    """Lines `subject: text`, without control characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: dict[str, tuple[str, float]] = {}

    def __call__(self, subject: str, text: str) -> None:
        """Write a line when the text is new, and new in kind or not too soon after the last one."""
        before, at = self._shown.get(subject, ("", 0.0))
        now = time.monotonic()
        same_kind = text.split(" ")[:1] == before.split(" ")[:1]
        if text == before or (same_kind and now - at < _PLAIN_EVERY_S):
            return
        self._shown[subject] = (text, now)
        print(f"{subject}: {text}", file=self._stream, flush=True)


@contextlib.contextmanager
def show_progress(stream: TextIO) -> Iterator[Progress]:
    """Yield the Progress that suits `stream`."""
    if not stream.isatty():
        yield PlainProgress(stream)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    lines: dict[str, str] = {}
    began = time.monotonic()

    def draw() -> Table:
        table = Table.grid(padding=(0, 2))
        for subject, text in lines.items():
            table.add_row(f"[bold]{subject}[/bold]", text)
        table.add_row("", f"[dim]{time.monotonic() - began:.0f} s[/dim]")
        return table

    with Live(console=Console(file=stream), get_renderable=draw, refresh_per_second=4, transient=True):

        def report(subject: str, text: str) -> None:
            lines[subject] = text

        yield report
