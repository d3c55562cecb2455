"""Rank 0's care for the other ranks of its worker: they are started, asked after, and let go.

A worker is whole or not at all. When a rank is lost, what the others hold of the pool is worth nothing, so
rank 0 gives up, the rest end with it, and all come back together as a fresh worker.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
from collections.abc import Callable
from typing import Protocol

from kvhive.proto.errors import ModelError, Unavailable
from kvhive.worker.options import WorkerOptions
from kvhive.worker.rank_group import Meeting, RankGroup
from kvhive.worker.rank_steps import ask_all, tell_end
from kvhive.worker.runner_loader import load_worker_runner, torch_device
from kvhive.worker.torch_runner import TorchModelRunner

log = logging.getLogger(__name__)

ASK_S = 2.0
"""How often an idle rank 0 asks whether all are there; RANK_TIMEOUT_S (rank_group.py) is many times that."""
_END_S = 5.0
_REASON_S = 5.0


class RankProcesses(Protocol):
    """Where ranks 1, 2, ... of one worker run. Used for one start only; `stop` may come from any thread."""

    def start(self, meeting: Meeting, lost: Callable[[str], None]) -> None:
        """Return when each rank has begun, and calls rank_follower.follow. Raises Unavailable if one cannot.

        `lost` is called, with the rank and the reason, when one ends before `stop` is called.
        """
        ...

    def stop(self) -> None:
        """End what still runs. Idempotent."""
        ...


class RankLeader:
    """Rank 0's side of one start of a worker. `close` may be called at any time, and then nothing else."""

    def __init__(self, processes: RankProcesses, on_lost: Callable[[], None], ask_s: float = ASK_S) -> None:
        """Lead the ranks of `processes`; `on_lost` is called, from any thread, when a loaded one is lost."""
        self._processes = processes
        self._on_lost = on_lost
        self._ask_s = ask_s
        self._group: RankGroup | None = None
        self._loaded = False
        self._reason = ""
        self._told = threading.Event()
        self._closing = threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="kvhive-ranks-")

    def load(self, options: WorkerOptions) -> TorchModelRunner:
        """Start the other ranks, and return rank 0's runner when all have loaded their part.

        Raises ModelError, with the rank and its reason, when one cannot.
        """
        device = torch_device(options.device)
        try:
            meeting = Meeting(f"{self._folder.name}/meeting", options.tensor_parallel)
            self._processes.start(meeting, self._lost)
            group = RankGroup(meeting, 0, device, options.deterministic)
            if device.type != "cuda":
                self._folder.cleanup()  # whatever ends this process, it leaves no file
            runner = load_worker_runner(options, group)
        except Unavailable as error:
            self._told.wait(_REASON_S)  # why a rank ended comes another way, and later
            raise ModelError(f"of {options.tensor_parallel} ranks: {self._reason or error}") from error
        group.started()
        self._group, self._loaded = group, True
        if self._reason:
            raise ModelError(f"of {options.tensor_parallel} ranks: {self._reason}")
        threading.Thread(target=self._ask, args=(group,), name="ranks", daemon=True).start()
        return runner

    def close(self) -> None:
        """Let the other ranks go, and end those that do not."""
        self._closing.set()
        # A step that hangs holds the turn. Then the ranks are not asked to end, but ended.
        if self._group is not None and self._group.turn.acquire(timeout=_END_S):
            with contextlib.suppress(Unavailable):
                tell_end(self._group)
            self._group.turn.release()
        self._processes.stop()
        self._folder.cleanup()

    def _ask(self, group: RankGroup) -> None:
        while not self._closing.wait(self._ask_s):
            try:
                with group.turn:
                    if not self._closing.is_set():
                        ask_all(group)
            except Unavailable as error:
                self._lost(str(error))
                return

    def _lost(self, reason: str) -> None:
        if self._closing.is_set():
            return
        self._reason = self._reason or reason
        self._told.set()
        log.critical("a rank is lost, the worker gives up reason=%s", reason)
        if self._loaded:
            self._on_lost()
        else:
            self._processes.stop()  # `load` waits for a rank that never comes: closed connections tell it
