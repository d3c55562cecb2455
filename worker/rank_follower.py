"""What ranks 1, 2, ... of a worker do: load their part of the model, compute what rank 0 tells them."""

from __future__ import annotations

import logging

from kvhive.worker.options import WorkerOptions
from kvhive.worker.rank_group import Meeting, RankGroup
from kvhive.worker.runner_loader import load_worker_runner, set_threads, torch_device

log = logging.getLogger(__name__)


def follow(options: WorkerOptions, meeting: Meeting, rank: int) -> None:
    """Return when rank 0 ends the work.

    Raises Unavailable when another rank is lost, ModelError when this one's part cannot be loaded.
    """
    set_threads(options.threads)
    group = RankGroup(meeting, rank, torch_device(options.device), options.deterministic)
    runner = load_worker_runner(options, group)
    group.started()
    log.info("following worker_id=%s rank=%d blocks=%d", options.worker_id, rank, runner.num_blocks)
    runner.follow()
