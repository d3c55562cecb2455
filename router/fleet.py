"""What routing knows of every worker, as columns that are kept up to date between decisions.

A decision reads all workers, but between two of them only a few change: those that reported, and those that
got or ended a request. So a decision among hundreds of workers costs little more than one among eight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvhive.proto.index_schema import LoadReport
from kvhive.router.candidate_table import CandidateTable, Column
from kvhive.router.load_tracker import COLD_HALF_LIFE_S, LoadTracker
from kvhive.router.rendezvous import worker_seeds
from kvhive.router.routing_policy import Speed
from kvhive.router.worker_registry import WorkerView

UNMEASURED = Speed(step_base_s=0.01, per_token_s=0.001, per_attention_s=0.0, max_step_tokens=1)
"""Until any worker has measured itself: whatever it is, more tokens take longer."""


class Fleet:
    """The routable workers in columns. For the event loop's thread."""

    def __init__(self, loads: LoadTracker) -> None:
        self._loads = loads
        self._views: list[WorkerView] = []
        self._rows: dict[str, int] = {}
        self._resize(())

    def update(self, views: list[WorkerView], now: float) -> None:
        """Let these be the workers. O(what changed), and a look at each view."""
        changed = self._loads.take_changed()
        if views != self._views:  # the same objects compare by identity, in nanoseconds
            changed |= self._replace(views, now)
        for worker_id in changed:
            row = self._rows.get(worker_id)
            if row is not None:
                self._set_load(row, self._views[row], now)

    def view(self, worker_id: str) -> WorkerView:
        """Return a worker's view as of the last update."""
        return self._views[self._rows[worker_id]]

    def candidates(
        self, matches: Mapping[str, int], longer: Iterable[tuple[str, int]], now: float
    ) -> CandidateTable:
        """Return all workers: with what each holds of a prompt, and for some, what it soon will hold."""
        matched = np.zeros(len(self._rows))
        for worker_id, blocks in matches.items():
            if worker_id in self._rows:
                matched[self._rows[worker_id]] = blocks
        expected = matched.copy()
        for worker_id, blocks in longer:
            if worker_id in self._rows:
                expected[self._rows[worker_id]] = blocks
        recent = self._cold_tokens * np.exp2((self._cold_as_of - now) / COLD_HALF_LIFE_S)
        queue, decoding, requests = self._load
        return CandidateTable(
            self._worker_ids, self._seeds, matched, expected, queue, decoding, requests, recent, *self._static
        )

    def _resize(self, views: Sequence[WorkerView]) -> None:
        self._worker_ids = [view.record.worker_id for view in views]
        self._rows = {worker_id: row for row, worker_id in enumerate(self._worker_ids)}
        self._seeds = worker_seeds(self._worker_ids)
        self._static: Column = np.zeros((8, len(views)))
        self._load: Column = np.zeros((3, len(views)))
        self._cold_tokens, self._cold_as_of = np.zeros((2, len(views)))

    def _replace(self, views: list[WorkerView], now: float) -> set[str]:
        """Take in new views and return whose they are."""
        same = [view.record.worker_id for view in views] == self._worker_ids
        new = [row for row, view in enumerate(views) if not same or view is not self._views[row]]
        if not same:
            self._resize(views)
        self._views = views
        speeds = _speeds([view.record.load for view in views])
        for row in new:
            record, speed = views[row].record, speeds[row]
            load = record.load
            self._loads.report_cold(record.worker_id, load.prefix_queries - load.prefix_hits, now)
            self._static[:, row] = (
                speed.step_base_s,
                speed.per_token_s,
                speed.per_attention_s,
                speed.max_step_tokens,
                np.inf if load.victim_age_s < 0 else load.victim_age_s,
                load.blocks_free * record.block_size,
                load.blocks_total * record.block_size,
                load.blocks_live * record.block_size,
            )
        return {self._worker_ids[row] for row in new}

    def _set_load(self, row: int, view: WorkerView, now: float) -> None:
        worker_id, load, loads = view.record.worker_id, view.record.load, self._loads
        in_flight = loads.in_flight(worker_id)
        self._load[:, row] = (
            loads.queue_tokens(worker_id, load.queued_prefill_tokens, view.reported_at),
            max(load.running, in_flight),
            max(load.running + load.waiting, in_flight),
        )
        self._cold_tokens[row] = loads.recent_cold_tokens(worker_id, now)
        self._cold_as_of[row] = now


def _speeds(loads: Sequence[LoadReport]) -> list[Speed]:
    """Return each worker's step-time model; one that has not measured itself is taken for a typical one."""
    models = [(load.step_base_s, load.step_per_token_s, load.step_per_attention_s) for load in loads]
    measured = [model for model in models if any(model)]
    if len(measured) < len(models):
        unmeasured = UNMEASURED.step_base_s, UNMEASURED.per_token_s, UNMEASURED.per_attention_s
        typical = tuple(np.median(measured, axis=0).tolist()) if measured else unmeasured
        models = [model if any(model) else typical for model in models]
    return [Speed(*model, load.max_step_tokens) for model, load in zip(models, loads, strict=True)]
