"""The ranks of a worker as processes of their own, without Ray, for one model after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvhive.worker.options import WorkerOptions
from kvhive.worker.rank_follower import follow
from kvhive.worker.rank_group import Meeting, RankGroup
from kvhive.worker.rank_leader import RankLeader
from kvhive.worker.rank_steps import tell_end
from kvhive.worker.runner_loader import load_worker_runner, torch_device
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


def forkserver() -> Any:
    """Make processes by forking one that knows torch: importing it takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvhive.worker.rank_follower", "rank_rig"])
    return context


class ForkedRanks:
    """Implements RankProcesses with plain processes."""

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.processes: list[Any] = []
        self._stopped = False

    def start(self, meeting: Meeting, lost: Callable[[str], None]) -> None:
        for rank in range(1, meeting.ranks):
            process = forkserver().Process(target=follow, args=(self.options, meeting, rank), daemon=True)
            process.start()
            self.processes.append(process)
        threading.Thread(target=self._watch, args=(lost,), daemon=True).start()

    def stop(self) -> None:
        self._stopped = True
        for process in self.processes:
            process.kill()
            process.join(10)

    def _watch(self, lost: Callable[[str], None]) -> None:
        sentinels = [process.sentinel for process in self.processes]
        (ended, *_) = multiprocessing.connection.wait(sentinels)
        rank = 1 + sentinels.index(ended)
        if not self._stopped:
            lost(f"rank {rank}: ended")


class Led:
    """A leader with its ranks, and whether it heard of a loss."""

    def __init__(self, model: Path, ask_s: float, ranks: int = 2) -> None:
        self.options = rank_options(model, tensor_parallel=ranks)
        self.ranks = ForkedRanks(self.options)
        self.lost = threading.Event()
        self.leader = RankLeader(self.ranks, self.lost.set, ask_s)

    def load(self) -> TorchModelRunner:
        return self.leader.load(self.options)

    @property
    def running(self) -> int:
        return sum(process.is_alive() for process in self.ranks.processes)


def lead_and_wait(model: Path, pipe: Connection) -> None:
    """A whole worker as one process: say which processes the other ranks are, and wait."""
    led = Led(model, ask_s=0.1)
    led.load()
    pipe.send([process.pid for process in led.ranks.processes])
    pipe.recv()


def _follow_many(orders: Connection, rank: int) -> None:
    """A rank's process: follow one worker after the other until the pipe closes."""
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)  # as Ray does
    with contextlib.suppress(EOFError):
        while True:
            options, meeting = orders.recv()
            load_worker_runner(options, RankGroup(meeting, rank, torch_device(options.device))).follow()


@dataclass
class RankProcesses:
    """Ranks 1, 2, ... of whatever worker is made next. They are forked from a server that knows torch."""

    orders: list[Connection] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)

    def give(self, options: WorkerOptions, meeting: Meeting) -> None:
        """Let each rank but the first join."""
        context = forkserver()
        while len(self.orders) < meeting.ranks - 1:
            ours, theirs = context.Pipe()
            process = context.Process(target=_follow_many, args=(theirs, len(self.orders) + 1), daemon=True)
            process.start()
            theirs.close()
            self.orders.append(ours)
            self.processes.append(process)
        for orders in self.orders[: meeting.ranks - 1]:
            orders.send((options, meeting))

    @contextlib.contextmanager
    def runner(self, ranks: int, options: WorkerOptions) -> Iterator[TorchModelRunner]:
        """A runner whose model so many ranks share; this process is the first."""
        with tempfile.TemporaryDirectory() as folder:
            meeting = Meeting(f"{folder}/ranks", ranks)
            self.give(options, meeting)
            group = RankGroup(meeting, 0, torch_device(options.device))
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
