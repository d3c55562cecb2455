"""The ranks of a worker as processes of their own, without Ray, for one model after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvhive.worker.options import WorkerOptions
from kvhive.worker.rank_group import Meeting, RankGroup
from kvhive.worker.rank_steps import tell_end
from kvhive.worker.runner_loader import load_worker_runner
from kvhive.worker.torch_runner import TorchModelRunner


def rank_options(model: Path, **changes: Any) -> WorkerOptions:
    """What all ranks of a worker are told."""
    plain = {"block_size": 8, "pool_tokens": 1024, "max_running": 8}
    return WorkerOptions(
        worker_id="w1",
        cluster="ranks",
        model_path=str(model),
        model_name="tiny",
        redis_url="redis://127.0.0.1:1",
        cluster_token="t",
        **{**plain, **changes},
    )


def _follow_many(orders: Connection) -> None:
    """A rank's process: follow one worker after the other until the pipe closes."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            options, meeting, rank = orders.recv()
            load_worker_runner(options, RankGroup(meeting, rank, torch.device("cpu"))).follow()


@dataclass
class RankProcesses:
    """Ranks 1, 2, ... of whatever worker is made next. They are forked from a server that knows torch."""

    orders: list[Connection] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)

    def give(self, options: WorkerOptions, meeting: Meeting) -> None:
        """Let each rank but the first join."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvhive.worker.runner_loader", "rank_rig"])
        while len(self.orders) < meeting.ranks - 1:
            ours, theirs = context.Pipe()
            process = context.Process(target=_follow_many, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.orders.append(ours)
            self.processes.append(process)
        for rank in range(1, meeting.ranks):
            self.orders[rank - 1].send((options, meeting, rank))

    @contextlib.contextmanager
    def runner(self, ranks: int, options: WorkerOptions) -> Iterator[TorchModelRunner]:
        """A runner whose model so many ranks share; this process is the first."""
        with tempfile.TemporaryDirectory() as folder:
            meeting = Meeting(f"{folder}/ranks", ranks)
            self.give(options, meeting)
            group = RankGroup(meeting, 0, torch.device("cpu"))
            runner = load_worker_runner(options, group)
            group.started()
            try:
                yield runner
            finally:
                with group.turn:
                    tell_end(group)

    def close(self) -> None:
        """End the processes."""
        for end in self.orders:
            end.close()
        for process in self.processes:
            process.join(10)
            process.kill()
