"""What a Ray head of ours does without: `ray start` calls this, by its RAY_START_HOOK."""

from __future__ import annotations

from typing import Any


def leave_out(parameters: Any, head: bool) -> None:
    """Start no server for Ray's remote clients: it takes seconds of a core, and a port, and nobody calls it.

    `parameters` are Ray's own, which it is about to start with; for this one there is no option.
    """
    parameters.ray_client_server_port = None
