"""The life of the server inside one worker process: started, tried again, stopped.

The first start fails for good, so that somebody reads why. A restarted worker has served before: what stops
it now (Redis away, memory short) may pass, so it tries again for ever, slower and slower.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Literal

from kvhive.worker.server import WorkerServer

log = logging.getLogger(__name__)

RETRY_FIRST_S = 1.0
RETRY_LONGEST_S = 30.0

Phase = Literal["starting", "serving", "failed", "stopped"]


class ServerLife:
    """Starts servers that `make_server` returns until one serves. `stop` may be called from any thread."""

    def __init__(
        self, make_server: Callable[[], WorkerServer], restarted: bool, retry_first_s: float = RETRY_FIRST_S
    ) -> None:
        self._make_server = make_server
        self._restarted = restarted
        self._retry_first_s = retry_first_s
        self._stopping = threading.Event()
        self._turn = threading.Lock()
        """Guards the one step between a server that has started and one that is known to serve."""
        self._serving = False
        self.failure = ""
        """Why the last start failed."""
        self.server = make_server()

    @property
    def phase(self) -> Phase:
        """Where the worker is now; answers at once."""
        if self._stopping.is_set():
            return "stopped"
        if self._serving:
            return "serving"
        return "failed" if self.failure else "starting"

    def run(self) -> None:
        """Return when a server serves, the only try has failed, or `stop` was called."""
        wait_s = self._retry_first_s
        while not self._stopping.is_set():
            try:
                self._try_to_serve()
            except Exception as error:  # the thread's last line, else `status` would say "starting" for ever
                log.exception("cannot start")
                self.failure = f"{type(error).__name__}: {error}"
            else:
                self.failure = ""
                return
            if not self._restarted:
                return
            self._stopping.wait(wait_s)
            wait_s = min(2 * wait_s, RETRY_LONGEST_S)
            self.server = self._make_server()

    def stop(self, grace_s: float) -> None:
        """Refuse new requests, give running ones `grace_s` seconds, deregister.

        A start under way is not waited for: it ends by itself and is undone.
        """
        with self._turn:
            self._stopping.set()
            serving = self._serving
        if serving:
            self.server.stop(grace_s)

    def _try_to_serve(self) -> None:
        with contextlib.ExitStack() as undo:
            # Whatever a failed start has opened (threads, sockets, a pool) must not add up over many tries.
            undo.callback(self.server.stop, 0.0)
            self.server.start()
            with self._turn:
                self._serving = not self._stopping.is_set()
            if self._serving:
                undo.pop_all()
