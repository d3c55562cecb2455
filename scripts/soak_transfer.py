"""`python -m kvhive.scripts.soak_transfer`: thousands of pulls between workers that are stopped and killed.

Two workers of a small random model, without Ray and router. Prompts are computed on one and then pulled by
the other one, while both also serve other requests from pools too small for all of it. Every so often the
source is killed, stopped for a while or restarted in the middle of a pull. Each answer must be that of
computing, token for token, and at the end nobody may hold a block. Prints one JSON object; the exit status is
1 when anything was wrong.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import grpc

from kvhive.proto.config import TransferConfig
from kvhive.scripts.bare_workers import BareWorker, bare_workers
from kvhive.scripts.embedded_redis import EmbeddedRedis
from kvhive.scripts.progress import Progress, show_progress
from kvhive.scripts.random_model import RandomModel, write_random_model
from kvhive.worker.options import WorkerOptions

BLOCK = 16
ANSWER = 4
TRANSFER = TransferConfig(timeout_s=3.0, stall_timeout_s=1.0, chunk_mib=1)
ANSWER_WITHIN_S = 60.0
"""After this long a request hangs, however loaded the machine is."""
FAULTS = ("kill", "stop", "restart")
SLOW_BYTES_PER_S = 20e6
"""What the sources send: a pull of 30 blocks takes a fifth of a second, in which it can be struck."""


@dataclass(slots=True)
class Tally:
    """What happened."""

    pulls: int = 0
    pulled_tokens: int = 0
    other_requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Soak:
    """One run. Everything random comes from one seed."""

    def __init__(self, workers: list[BareWorker], model: RandomModel, seed: str) -> None:
        self._workers = workers
        self._random = random.Random(seed)
        self._vocabulary = model.vocabulary
        self._trunks = [self._tokens(400) for _ in range(6)]
        self._down: set[str] = set()
        """Workers that are being struck: what fails there is no violation."""
        self.tally = Tally()

    async def run(self, pulls: int, faults: int, progress: Progress) -> Tally:
        """Do it all, and look at what is left."""
        strikes = set(self._random.sample(range(pulls), faults))
        load = [asyncio.create_task(self._load(worker)) for worker in self._workers]
        try:
            for number in range(pulls):
                await self._pull(number, number in strikes)
                progress("soak", f"pulls {number + 1} of {pulls}, faults {self.tally.faults.total()}")
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
        for worker in self._workers:
            await self._look(worker)
            await worker.disconnect()
        return self.tally

    async def _pull(self, number: int, strike: bool) -> None:
        source, target = self._random.sample(self._workers, 2)
        prompt, salt = self._prompt(), self._random.choice(["", "a", "b"])
        expected, _ = await self._ask(source, prompt, salt)
        named = source.as_source(len(prompt) // BLOCK)
        pull = asyncio.create_task(self._ask(target, prompt, salt, named))
        if strike:
            await asyncio.sleep(self._random.uniform(0.0, 0.15))
            await self._strike(source, self._random.choice(FAULTS))
        answer, pulled = await pull
        self.tally.pulls += 1
        self.tally.pulled_tokens += pulled
        if answer != expected:
            self.tally.violations.append(f"pull {number}: {answer} instead of {expected}")

    async def _strike(self, victim: BareWorker, fault: str) -> None:
        """Hurt a worker, and let it come back."""
        self.tally.faults[fault] += 1
        self._down.add(victim.worker_id)
        try:
            if fault == "stop":
                victim.signal(signal.SIGSTOP)
                await asyncio.sleep(self._random.uniform(0.1, 5.0))
                victim.signal(signal.SIGCONT)
                return
            self._count(await victim.status())
            victim.end()
            if fault == "kill":  # the pull runs into a worker that is not there
                await asyncio.sleep(self._random.uniform(0.0, 2.0))
            await asyncio.to_thread(victim.start)
        finally:
            self._down.discard(victim.worker_id)

    async def _load(self, worker: BareWorker) -> None:
        """Other requests, one after the other, for ever."""
        while True:
            epoch = worker.epoch
            try:
                await self._generate(worker, self._tokens(self._random.randint(20, 300)), 12, "load", None)
                self.tally.other_requests += 1
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                if worker.worker_id not in self._down and worker.epoch == epoch:
                    await asyncio.sleep(0.2)
                    if worker.worker_id not in self._down and worker.epoch == epoch:
                        self.tally.violations.append(f"load on {worker.worker_id}: {error!r}"[:300])
            await asyncio.sleep(0.01)

    async def _ask(
        self, worker: BareWorker, prompt: list[int], salt: str, source: Any = None
    ) -> tuple[list[int], int]:
        began = time.monotonic()
        answer, first = await self._generate(worker, prompt, ANSWER, salt, source)
        if source is not None:  # whoever looks only when the source is back has waited for that, too
            self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - began)
        if first.cached_tokens + first.pulled_tokens + first.written_tokens > len(prompt):
            self.tally.violations.append(f"told more tokens than there are: {first}")
        return answer, first.pulled_tokens

    async def _generate(
        self, worker: BareWorker, prompt: list[int], tokens: int, salt: str, source: Any
    ) -> tuple[list[int], Any]:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await worker.generate(secrets.token_hex(6), prompt, tokens, source, salt)

    async def _look(self, worker: BareWorker) -> None:
        """At the end nobody holds anything, and every block is accounted for."""
        deadline = time.monotonic() + 15
        while True:
            status = await worker.status()
            if not status.blocks_live or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        self._count(status)
        parts = status.blocks_live + status.blocks_cached + status.blocks_free
        if status.blocks_live or parts != status.blocks_total:
            self.tally.violations.append(f"{worker.worker_id} is left with {status}")

    def _count(self, status: Any) -> None:
        self.tally.outcomes.update(dict(status.pulls))

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(count)]

    def _prompt(self) -> list[int]:
        trunk = self._random.choice(self._trunks)
        return trunk[: self._random.randint(0, len(trunk))] + self._tokens(self._random.randint(20, 200))


def soak(pulls: int, faults: int, seed: str, report: Progress, backend: str = "auto") -> dict[str, Any]:
    """Run it on two workers of their own, and return what happened."""
    model = RandomModel()
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "redis") as redis:
        path = write_random_model(Path(folder) / "model", model)
        token = secrets.token_hex(16)
        options = [
            WorkerOptions(
                worker_id=worker_id,
                cluster="soak",
                model_path=str(path),
                model_name="random",
                redis_url=redis.url,
                cluster_token=token,
                pool_tokens=2048,
                transfer=replace(TRANSFER, backend=backend),
                emulated_bytes_per_s=SLOW_BYTES_PER_S,
            )
            for worker_id in ("w1", "w2")
        ]
        with bare_workers(options) as workers:
            tally = asyncio.run(Soak(workers, model, seed).run(pulls, faults, report))
    return {
        "seed": seed,
        "backend": backend,
        "pulls": tally.pulls,
        "pulled_tokens": tally.pulled_tokens,
        "other_requests": tally.other_requests,
        "faults": dict(tally.faults),
        "outcomes": dict(tally.outcomes),
        "slowest_s": round(tally.slowest_s, 3),
        "violations": tally.violations,
    }


@click.command()
@click.option("--pulls", type=click.IntRange(1, 1_000_000), default=1000, show_default=True)
@click.option("--faults", type=click.IntRange(0, 1_000_000), default=50, show_default=True)
@click.option("--seed", default="", help="Same seed, same prompts and faults; by default a new one.")
@click.option("--backend", type=click.Choice(["auto", "tcp", "gloo"]), default="auto", show_default=True)
def main(pulls: int, faults: int, seed: str, backend: str) -> None:
    """Pull between two workers, strike them in the middle of it, and check every answer."""
    if faults > pulls:
        raise click.BadParameter(f"--faults: must be at most --pulls ({pulls}), is {faults}")
    with show_progress(sys.stderr) as progress:
        result = soak(pulls, faults, seed or secrets.token_hex(4), progress, backend)
    click.echo(json.dumps(result))
    sys.exit(1 if result["violations"] else 0)


if __name__ == "__main__":
    main()
