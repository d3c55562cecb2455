"""What a step costs besides computing: scheduler, pool and engine, on a runner that takes no time.

    python -m kvhive.scripts.bench_step

Prints milliseconds a step for growing batches of decoding sequences of about 1,000 tokens, of which one in
sixteen fills a block in each step, and the line through them: what a step costs at all, and what each running
sequence adds. And what one round of an empty loop costs Python here, now: half of that on another machine
means half of the rest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as ReadOnly

from kvhive.proto.block_hash import root_hash
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.engine import Engine, EngineHooks
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.model_runner import Chunk, ChunkResult, ModelShape
from kvhive.worker.scheduler import Scheduler, SchedulerLimits
from kvhive.worker.sequence import SamplingParams, Sequence

BLOCK_SIZE = 16
CONTEXT = 1000
BATCHES = (1, 16, 64, 256)
STEPS = 200
ROUNDS = 5


class IdleRunner:
    """Implements ModelRunner: every token is the same, and costs nothing."""

    device = "none"
    shape = ModelShape(
        vocab_size=1000, max_context=8192, layers=1, kv_heads=1, head_dim=1, bytes_per_element=4
    )

    overlaps = False

    def launch(self, chunks: ReadOnly[Chunk]) -> Callable[[], list[ChunkResult]]:
        """Put it off to the end."""
        return lambda: self.run(chunks)

    def run(self, chunks: ReadOnly[Chunk]) -> list[ChunkResult]:
        """Answer at once."""
        return [ChunkResult((7,) if chunk.sampling else ()) for chunk in chunks]


def step_ms(batch: int) -> float:
    """Return the median milliseconds of a step in which `batch` sequences decode one token each."""
    blocks = batch * ((CONTEXT + STEPS) // BLOCK_SIZE + 3)
    manager = KvCacheManager(BlockPool(blocks), BLOCK_SIZE, root_hash(b"bench"), time.monotonic)
    scheduler = Scheduler(manager, SchedulerLimits(batch * (CONTEXT + BLOCK_SIZE), batch, batch))
    hooks = EngineHooks(deliver=lambda outputs: None, publish=lambda events: None)
    engine = Engine(IdleRunner(), scheduler, hooks, time.monotonic)
    sampling = SamplingParams(max_tokens=STEPS + 20)
    for number in range(batch):
        tokens = [number, *range(1, CONTEXT + number % BLOCK_SIZE)]
        engine.submit(Sequence(f"r{number}", tokens, len(tokens), sampling))
    engine.step()  # the prompts
    times = []
    for _ in range(STEPS):
        began = time.thread_time()
        engine.step()
        times.append(time.thread_time() - began)
    return 1e3 * statistics.median(times)


def loop_ns() -> float:
    """Return the nanoseconds of one round of an empty loop: how fast Python is here, now."""
    rounds = range(100_000)
    times = []
    for _ in range(9):
        began = time.thread_time()
        for _ in rounds:
            pass
        times.append(time.thread_time() - began)
    return 1e9 * statistics.median(times) / len(rounds)


def main() -> None:
    """Measure and print."""
    medians = {}
    for batch in BATCHES:
        medians[batch] = statistics.median(step_ms(batch) for _ in range(ROUNDS))
        print(f"{batch:4d} sequences: {medians[batch]:7.3f} ms a step")
    per_sequence = (medians[256] - medians[1]) / 255
    print(f"an empty loop: {loop_ns():.1f} ns a round")
    print(f"a step: {medians[1] - per_sequence:.3f} ms and {1e3 * per_sequence:.2f} us a sequence")


if __name__ == "__main__":
    main()
