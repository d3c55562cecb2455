"""What routing knows of every worker, as columns that are kept up to date between decisions.

A decision reads all workers, but between two of them only a few change: those that reported, and those that
got or ended a request. So a decision among hundreds of workers costs little more than one among eight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvhive.proto.index_schema import LoadReport
from kvhive.router.candidate_table import CandidateTable, Column
from kvhive.router.load_tracker import COLD_HALF_LIFE_S, LoadTracker, per_second
from kvhive.router.rendezvous import worker_seeds
from kvhive.router.worker_registry import WorkerView

UNMEASURED = 0.01, 0.001, 0.0
"""Seconds per step, token and pair until any worker has measured itself: more tokens take longer."""

REFERENCE_TOKENS = 512
"""Workers are compared by what a prompt of this length takes them."""

ALIKE_SHARE = 0.25
"""Workers within 25 % of the typical one are taken for equals: what equal ones measure differs by as much."""


MOST_RUNNING = -1
"""Of the static columns: sequences that run at once."""


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
        self, matches: Mapping[str, int], longer: Iterable[tuple[str, int]], now: float, priority: int = 0
    ) -> CandidateTable:
        """Return all workers: with what each holds of a prompt, and for some, what it soon will hold.

        What waits there at a lower priority than the request's, below 0 or not above it, is left out: the
        request goes before it.
        """
        matched, shared = np.zeros((2, len(self._rows)))
        for worker_id, blocks in matches.items():
            if worker_id in self._rows:
                matched[self._rows[worker_id]] = blocks
        expected = matched.copy()
        for worker_id, blocks in longer:
            if worker_id in self._rows:
                expected[self._rows[worker_id]] = blocks
        recent = self._cold_tokens * np.exp2((self._cold_as_of - now) / COLD_HALF_LIFE_S)
        cold = recent, per_second(recent, now - self._cold_since)
        load = self._load_columns
        if priority >= 0 and self._outranked[min(priority, 1)].any():
            tokens, waiting = self._outranked[min(priority, 1)]
            queue, decoding, requests, live = load
            most = self._static_columns[MOST_RUNNING]
            running = np.where(most > 0, np.minimum(decoding, most), decoding)
            load = [np.maximum(queue - tokens, 0.0), running, np.maximum(requests - waiting, running), live]
        columns = *load, *cold, *self._speed_columns, *self._static_columns
        return CandidateTable(self._worker_ids, self._seeds, matched, expected, shared, *columns)

    def _resize(self, views: Sequence[WorkerView]) -> None:
        self._worker_ids = [view.record.worker_id for view in views]
        self._rows = {worker_id: row for row, worker_id in enumerate(self._worker_ids)}
        self._seeds = worker_seeds(self._worker_ids)
        self._speed: Column = np.zeros((4, len(views)))
        self._static: Column = np.zeros((10, len(views)))
        self._outranked: Column = np.zeros((2, 2, len(views)))  # by priority 0 and above, tokens and requests
        self._load: Column = np.zeros((4, len(views)))
        self._speed_columns, self._static_columns = list(self._speed), list(self._static)
        self._load_columns = list(self._load)
        self._cold_tokens, self._cold_as_of, self._cold_since = np.zeros((3, len(views)))

    def _replace(self, views: list[WorkerView], now: float) -> set[str]:
        """Take in new views and return whose they are."""
        same = [view.record.worker_id for view in views] == self._worker_ids
        new = [row for row, view in enumerate(views) if not same or view is not self._views[row]]
        if not same:
            self._resize(views)
        self._views = views
        speeds = _speeds([view.record.load for view in views])
        self._speed[:] = np.array(speeds, np.float64).reshape(len(views), 4).T
        for row in new:
            record = views[row].record
            load = record.load
            computed = load.prefix_queries - load.prefix_hits - load.pulled_tokens
            self._loads.report_cold(record.worker_id, computed, now)
            self._static[:, row] = (
                load.victim_reuse,
                load.blocks_free * record.block_size,
                load.blocks_total * record.block_size,
                load.growth_tokens,
                load.release_tokens,
                load.answer_tokens,
                load.block_bytes,
                load.pull_latency_s,
                load.pull_bytes_per_s,
                load.max_running,
            )
            self._outranked[:, :, row] = (
                (load.queued_low_tokens, load.waiting_low),
                (load.queued_prefill_tokens - load.queued_high_tokens, load.waiting - load.waiting_high),
            )
        return {self._worker_ids[row] for row in new}

    def _set_load(self, row: int, view: WorkerView, now: float) -> None:
        worker_id, load, loads = view.record.worker_id, view.record.load, self._loads
        in_flight = loads.in_flight(worker_id)
        in_pool = load.blocks_live * view.record.block_size + load.queued_prefill_tokens
        self._load[:, row] = (
            loads.queue_tokens(
                worker_id, load.queued_prefill_tokens, view.reported_at, float(self._speed[1, row])
            ),
            max(load.running, in_flight),
            max(load.running + load.waiting, in_flight),
            loads.pool_tokens(worker_id, in_pool, view.reported_at),
        )
        self._cold_tokens[row] = loads.recent_cold_tokens(worker_id, now)
        self._cold_as_of[row] = now
        self._cold_since[row] = loads.cold_since(worker_id, now)


def _speeds(loads: Sequence[LoadReport]) -> list[tuple[float, float, float, int]]:
    """Return each worker's step-time model: the typical worker's for all that are about as fast as it.

    What two equal workers measure of themselves differs; decisions must not, or cold prompts would all go to
    whoever measured least. One that has not measured itself yet is taken for typical, too.
    """
    models = [(load.step_base_s, load.step_per_token_s, load.step_per_attention_s) for load in loads]
    times = [base + REFERENCE_TOKENS * (token + pair * REFERENCE_TOKENS / 2) for base, token, pair in models]
    measured = sorted((time, model) for time, model in zip(times, models, strict=True) if time > 0)
    middle, typical = measured[len(measured) // 2] if measured else (0.0, UNMEASURED)
    alike = [time <= 0 or abs(time - middle) <= ALIKE_SHARE * middle for time in times]
    return [
        (*(typical if same else model), load.max_step_tokens)
        for same, model, load in zip(alike, models, loads, strict=True)
    ]
