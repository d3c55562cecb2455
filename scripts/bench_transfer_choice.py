"""Pull or compute, over context, missing blocks and bandwidth: what the cost chose, and what was faster.

Two real workers of a random model, the source's sending held back to the bandwidth. In each cell the target
has the context cached and lacks some blocks that the source has; the request is answered both ways in turn,
and beside the two times stands what the router's cost chooses from what the target reports in its lease.
Which way is faster is the median over pairs of neighbouring trials: a machine that becomes slow for a while
is slow for both of a pair.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import secrets
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from redis import Redis

from kvhive.proto.config import TransferConfig
from kvhive.proto.index_schema import IndexKeys, LoadReport
from kvhive.router.pull_cost import crossover_blocks
from kvhive.router.routing_cost import compare
from kvhive.router.routing_policy import Candidate, RouteRequest, Speed
from kvhive.scripts.bare_workers import BareWorker, bare_workers
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.scripts.progress import Progress
from kvhive.scripts.random_model import RandomModel, write_random_model
from kvhive.worker.options import WorkerOptions

BLOCK = 16
CLUSTER = "bench"
TAIL = 8
"""Tokens after the blocks, which are always computed."""
TRANSFER = TransferConfig(timeout_s=120.0, stall_timeout_s=60.0, chunk_mib=1)
LEARNING_PULLS = (4, 48, 12, 32, 4, 48)
"""Blocks of the pulls from which the target learns a new bandwidth; computing it has learnt at its start."""
TIE_SHARE = 0.1
"""Times that differ by less are no difference on a machine that does other things too."""
HEARTBEAT_S = 0.1


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells."""

    contexts: tuple[int, ...] = (0, 512, 1536)
    """Tokens that the target has."""
    missing: tuple[int, ...] = (4, 16, 64)
    """Blocks after them that it lacks."""
    bytes_per_s: tuple[float, ...] = (3e6, 12e6, 48e6, 192e6)
    repeats: int = 5


QUICK = Grid((0, 256), (4, 24), (2e6, 200e6), 1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One cell."""

    context: int
    missing: int
    bytes_per_s: float
    pull_s: float
    compute_s: float
    gain: float
    """Time to compute by time to pull, of each pair of trials; their median."""
    chose_pull: bool

    @property
    def right(self) -> bool:
        """Whether the faster way was chosen."""
        return self.chose_pull == (self.gain > 1.0)

    @property
    def tied(self) -> bool:
        """Whether there was no faster way worth the word, and so no wrong choice."""
        return max(self.gain, 1.0 / self.gain) <= 1.0 + TIE_SHARE


def measure(grid: Grid, progress: Progress) -> dict[str, Any]:
    """Measure all cells, and say how often the choice was right."""
    model = RandomModel()
    outcomes: list[Outcome] = []
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "redis") as server:
        path = write_random_model(Path(folder) / "model", model)
        redis = Redis.from_url(server.url)
        base = WorkerOptions(
            worker_id="target",
            cluster=CLUSTER,
            model_path=str(path),
            model_name="random",
            redis_url=server.url,
            cluster_token=secrets.token_hex(16),
            pool_tokens=8192,
            heartbeat_s=HEARTBEAT_S,
            transfer=TRANSFER,
        )
        for number, rate in enumerate(grid.bytes_per_s):
            progress("bench", f"choices at {rate / 1e6:g} MB/s ({number + 1} of {len(grid.bytes_per_s)})")
            pair = [base, replace(base, worker_id="source", emulated_bytes_per_s=rate)]
            with bare_workers(pair) as (target, source):
                found, load = asyncio.run(_Choices(target, source, redis, model, grid).run(rate))
            outcomes += found
            lines.append({"bytes_per_s": rate, "crossover_blocks": _crossover(load, model), **_rates(load)})
        redis.close()
    return {
        "choice_right_ratio": sum(o.right or o.tied for o in outcomes) / len(outcomes),
        "choice_strictly_right_ratio": sum(o.right for o in outcomes) / len(outcomes),
        "ties": sum(o.tied for o in outcomes),
        "block_bytes": model.block_bytes(BLOCK),
        "bandwidths": lines,
        "grid": [{**asdict(outcome), "right": outcome.right, "tied": outcome.tied} for outcome in outcomes],
    }


class _Choices:
    """The cells of one bandwidth."""

    def __init__(
        self, target: BareWorker, source: BareWorker, redis: Redis, model: RandomModel, grid: Grid
    ) -> None:
        self._target, self._source = target, source
        self._redis = redis
        self._model = model
        self._grid = grid
        self._random = random.Random(0)

    async def run(self, rate: float) -> tuple[list[Outcome], LoadReport]:
        for blocks in LEARNING_PULLS:
            await self._one(0, blocks, pull=True)
        outcomes = []
        for context, missing in itertools.product(self._grid.contexts, self._grid.missing):
            times: dict[bool, list[float]] = {True: [], False: []}
            chosen = []
            for trial in range(self._grid.repeats):
                for pull in (trial % 2 == 0, trial % 2 == 1):
                    seconds, chose = await self._one(context, missing, pull)
                    times[pull].append(seconds)
                    chosen.append(chose)
            outcomes.append(
                Outcome(
                    context,
                    missing,
                    rate,
                    statistics.median(times[True]),
                    statistics.median(times[False]),
                    statistics.median(c / p for p, c in zip(times[True], times[False], strict=True)),
                    sum(chosen) * 2 > len(chosen),
                )
            )
        load = self._load()
        for worker in (self._target, self._source):
            await worker.disconnect()
        return outcomes, load

    async def _one(self, context: int, missing: int, pull: bool) -> tuple[float, bool]:
        """Answer one request one way; return the seconds to its token, and what the cost chooses."""
        await self._target.clear()
        tokens = [self._random.randrange(self._model.vocabulary) for _ in range(context + missing * BLOCK)]
        prompt = [*tokens, *range(TAIL)]
        await self._source.generate(secrets.token_hex(6), prompt, 1)
        if context:
            await self._target.generate(secrets.token_hex(6), [*tokens[:context], 1], 1)
        await asyncio.sleep(3 * HEARTBEAT_S)
        chose = self._chooses(context, missing)
        named = self._source.as_source(len(tokens) // BLOCK) if pull else None
        began = time.perf_counter()
        _, first = await self._target.generate(secrets.token_hex(6), prompt, 1, named)
        seconds = time.perf_counter() - began
        assert (first.cached_tokens, first.pulled_tokens) == (context, missing * BLOCK * pull), first
        return seconds, chose

    def _chooses(self, context: int, missing: int) -> bool:
        held = context // BLOCK
        load = self._load()
        target = _candidate("target", load, held)
        source = _candidate("source", load, held + missing)
        request = RouteRequest(context + missing * BLOCK + TAIL, 1, BLOCK, b"")
        return bool(compare(request, [target, source])[0].pulled_blocks)

    def _load(self) -> LoadReport:
        raw: Any = self._redis.hget(IndexKeys(CLUSTER).worker("target"), "load")
        return LoadReport(**json.loads(raw))


def _candidate(worker_id: str, load: LoadReport, held: int) -> Candidate:
    return Candidate(
        worker_id=worker_id,
        matched_blocks=held,
        expected_blocks=held,
        queue_tokens=0,
        decoding=0,
        speed=_speed(load),
        victim_reuse=0.0,
        free_tokens=load.blocks_free * BLOCK,
        capacity_tokens=load.blocks_total * BLOCK,
        recent_cold_tokens=0.0,
        block_bytes=load.block_bytes,
        pull_latency_s=load.pull_latency_s,
        pull_bytes_per_s=load.pull_bytes_per_s,
    )


def _speed(load: LoadReport) -> Speed:
    return Speed(load.step_base_s, load.step_per_token_s, load.step_per_attention_s, load.max_step_tokens)


def _rates(load: LoadReport) -> dict[str, float]:
    return {"measured_latency_s": load.pull_latency_s, "measured_bytes_per_s": load.pull_bytes_per_s}


def _crossover(load: LoadReport, model: RandomModel) -> int:
    speed = _speed(load)
    return crossover_blocks(
        load.block_bytes,
        load.pull_latency_s,
        load.pull_bytes_per_s,
        lambda blocks: speed.prefill_s(blocks * BLOCK),
        model.context // BLOCK,
    )
