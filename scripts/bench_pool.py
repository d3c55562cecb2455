"""Does the pool's bookkeeping stay O(1) per block as the pool grows? `python -m kvhive.scripts.bench_pool`.

Prints the CPU time per block of each operation for pools of 1,000 to 1,000,000 blocks, in microseconds, and
the ratio to the smallest pool. Each figure is the median of several runs over the same number of blocks in
a full pool, chosen at random. They are touched once before: a large pool does not fit the processor's
caches, and the question here is whether the work grows. `--cold` leaves that out, to see the misses too.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Callable

import click

from kvhive.proto.block_hash import BlockHash
from kvhive.worker.block_pool import Block, BlockPool
from kvhive.worker.pins import PinBudget

SIZES = (1_000, 10_000, 100_000, 1_000_000)
CHAIN = 64
"""Blocks of one sequence: 1,024 tokens."""
TOUCHED = 128
"""Blocks per run, in chains; below the smallest pool's size, so that all pools do the same work."""
GOAL = 1.5
"""Largest ratio to the smallest pool that still counts as flat."""


def filled_pool(size: int) -> tuple[BlockPool, list[list[BlockHash]]]:
    """Return a pool whose blocks are all cached, and the chains of hashes in it."""
    pool = BlockPool(size, PinBudget(share_in_all=0.9, share_per_tenant=0.9))
    chains = [_hashes(start, min(CHAIN, size - start)) for start in range(0, size, CHAIN)]
    for chain in chains:
        blocks = pool.allocate(len(chain))
        for block, block_hash in zip(blocks, chain, strict=True):
            pool.register(block, block_hash)
        _release(pool, blocks)
    pool.drain_events()
    return pool, chains


def measure(size: int, runs: int, cold: bool, clock: Callable[[], float]) -> dict[str, float]:
    """Return the median seconds per block of each operation on a pool of `size` blocks."""
    pool, chains = filled_pool(size)
    chooser = random.Random(size)
    samples: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], list[Block]]) -> list[Block]:
        began = clock()
        blocks = work()
        samples.setdefault(name, []).append((clock() - began) / TOUCHED)
        return blocks

    fresh = size
    gc.disable()
    try:
        for _ in range(runs):
            wanted = _some_cached(pool, chains, chooser)
            if not cold:
                _release(pool, _match(pool, wanted))
            found = timed("match", lambda wanted=wanted: _match(pool, wanted))  # type: ignore[misc]
            timed("pin", lambda found=found: _pin(pool, found))  # type: ignore[misc]
            timed("free", lambda found=found: _release(pool, found))  # type: ignore[misc]
            pool.expire(1.0)
            if not cold:
                _touch_victims(pool)
            taken = timed("allocate", lambda: pool.allocate(TOUCHED))
            for start in range(0, TOUCHED, CHAIN):  # fill it up again
                hashes = _hashes(fresh, CHAIN)
                fresh += CHAIN
                chains.append(hashes)
                for block, block_hash in zip(taken[start : start + CHAIN], hashes, strict=True):
                    pool.register(block, block_hash)
            _release(pool, taken)
            pool.drain_events()
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in samples.items()}


def _hashes(first: int, count: int) -> list[BlockHash]:
    return [BlockHash(index.to_bytes(32, "little")) for index in range(first, first + count)]


def _some_cached(pool: BlockPool, chains: list[list[BlockHash]], chooser: random.Random) -> list[BlockHash]:
    chosen: dict[BlockHash, None] = {}
    while len(chosen) < TOUCHED:
        chain = chooser.choice(chains)
        if len(chain) == CHAIN and pool.lookup(chain[-1]):
            chosen.update(dict.fromkeys(chain))
    return list(chosen)


def _touch_victims(pool: BlockPool) -> None:
    """Evict what the timed allocation would have evicted, and put it back in the same place."""
    victims = pool.allocate(TOUCHED)
    hashes = _hashes(2**64 + victims[0].block_id, TOUCHED)
    for block, block_hash in zip(victims, hashes, strict=True):
        pool.register(block, block_hash)
    _release(pool, victims)
    pool.drain_events()
    for block in victims:
        pool._cached.move_to_end(block.block_id, last=False)


def _match(pool: BlockPool, hashes: list[BlockHash]) -> list[Block]:
    found = []
    for block_hash in hashes:
        block = pool.lookup(block_hash)
        assert block is not None, "a chain of which the last block is cached is cached whole"
        pool.acquire(block)
        found.append(block)
    return found


def _pin(pool: BlockPool, blocks: list[Block]) -> list[Block]:
    pool.pin(blocks, [0.5] * len(blocks), "tenant", 0.0)
    return blocks


def _release(pool: BlockPool, blocks: list[Block]) -> list[Block]:
    for block in reversed(blocks):
        pool.release(block, 0.0)
    return blocks


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--runs", default=201, show_default=True, help="Runs per size; the median counts.")
@click.option("--cold", is_flag=True, help="Do not touch the blocks before.")
@click.option("--largest", default=SIZES[-1], show_default=True, help="Largest pool, in blocks.")
def main(as_json: bool, runs: int, cold: bool, largest: int) -> None:
    """Measure and print."""
    results = {size: measure(size, runs, cold, time.thread_time) for size in SIZES if size <= largest}
    smallest = results[SIZES[0]]
    ratios = {
        size: {name: cost / smallest[name] for name, cost in costs.items()} for size, costs in results.items()
    }
    if as_json:
        click.echo(json.dumps({"seconds_per_block": results, "ratio_to_smallest": ratios, "goal": GOAL}))
        return
    click.echo(f"{'blocks':>10}" + "".join(f"{name:>22}" for name in smallest))
    for size, costs in results.items():
        cells = (f"{cost * 1e6:9.3f} us ({ratios[size][name]:.2f}x)" for name, cost in costs.items())
        click.echo(f"{size:>10,}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
