"""The mirror answers as a naive oracle does, whatever came in and however often."""

from __future__ import annotations

import math
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhive.proto.block_hash import BlockKey
from kvhive.proto.kv_events import EventBatch, RemovalCause
from kvhive.router.kv_index import KvIndex
from kvhive.router.kv_index_mirror import KvIndexMirror


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def chain_to(leaf: int) -> list[BlockKey]:
    """The chain that ends in block `leaf` of a binary tree whose root is 1."""
    return [key(leaf >> shift) for shift in range(leaf.bit_length() - 1, -1, -1)]


def batch(stored: set[int] | range = range(0), removed: set[int] | range = range(0)) -> EventBatch:
    return EventBatch(tuple(map(key, stored)), {RemovalCause.EVICTED: tuple(map(key, removed))})


workers = st.sampled_from(["w1", "w2", "w3", "w4"])
nodes = st.integers(1, 63)
steps = st.lists(
    st.tuples(st.sampled_from(["store", "evict", "drop", "replace", "sweep", "abandon"]), workers, nodes),
    max_size=80,
)


@given(steps, st.lists(nodes, min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_bisection_equals_the_walk_and_the_truth(
    steps: list[tuple[str, str, int]], questions: list[int]
) -> None:
    """Any history of prefix-closed caches: match, walk and a set-based oracle agree on every chain."""
    mirror, truth = KvIndexMirror(), dict[str, set[int]]()
    for action, worker, node in steps:
        path = {node >> shift for shift in range(node.bit_length())}
        under = {n for n in range(1, 64) if any(n >> s == node for s in range(6))}
        if action == "store":
            truth.setdefault(worker, set()).update(path)
            mirror.apply(worker, batch(stored=path))
            mirror.apply(worker, batch(stored=path))
        elif action == "evict":
            truth.setdefault(worker, set()).difference_update(under)
            mirror.apply(worker, batch(removed=under))
            mirror.apply(worker, batch(removed=under))
        elif action == "drop":
            truth.pop(worker, None)
            mirror.drop(worker)
        elif action == "replace":
            truth[worker] = path
            mirror.replace(worker, map(key, path))
        elif action == "abandon":
            load = mirror.load(worker)
            load.add(map(key, path))
            load.abandon()
        else:
            mirror.sweep(limit=node % 7 + 1)
    for leaf in [*questions, 63, 64]:
        keys = chain_to(leaf)
        expected = {}
        for worker, held in truth.items():
            length = next((i for i, k in enumerate(keys) if int.from_bytes(k, "big") not in held), len(keys))
            if length:
                expected[worker] = length
        assert mirror.match(keys) == mirror.walk(keys) == expected
    for worker in ("w1", "w2", "w3", "w4"):
        assert mirror.block_count(worker) == len(truth.get(worker, ()))
    while mirror.sweep():
        pass
    assert mirror.distinct_blocks() == len(set().union(*truth.values()))
    assert mirror.total_blocks() == sum(map(len, truth.values()))


def test_an_empty_chain_matches_nobody_and_an_unknown_worker_holds_nothing() -> None:
    """The edges of the contract."""
    mirror: KvIndex = KvIndexMirror()
    assert mirror.match([]) == {}
    assert mirror.match([key(1)]) == {}
    assert mirror.block_count("nobody") == 0


def test_a_snapshot_is_seen_only_when_complete() -> None:
    """While it loads, the old content answers; a drop in between does not confuse it."""
    mirror = KvIndexMirror()
    mirror.replace("w1", [key(1)])
    load = mirror.load("w1")
    load.add([key(1), key(2)])
    assert mirror.match([key(1), key(2)]) == {"w1": 1}
    load.commit()
    assert mirror.match([key(1), key(2)]) == {"w1": 2}
    mirror.drop("w1")
    assert mirror.match([key(1)]) == {}
    assert mirror.block_count("w1") == 0


def test_slots_are_reused() -> None:
    """A worker that restarts for ever does not widen the bitmaps nor leave entries behind."""
    mirror = KvIndexMirror()
    for _ in range(1000):
        mirror.replace("w1", map(key, range(1, 20)))
        mirror.drop("w1")
        mirror.sweep()
    assert mirror.distinct_blocks() == 0
    assert mirror._next_number <= 2


def test_a_worker_with_too_many_keys_is_cut_off() -> None:
    """The limit per worker holds, counts, and leaves known keys removable."""
    mirror = KvIndexMirror(max_keys_per_worker=10)
    mirror.apply("w1", batch(stored=range(1, 20)))
    assert mirror.block_count("w1") == 10
    assert mirror.refused_keys == 9
    mirror.apply("w1", batch(removed=range(1, 20)))
    assert mirror.distinct_blocks() == 0


def test_staleness() -> None:
    """Infinite before the first touch, then the time since; an older touch does not turn it back."""
    now = [100.0]
    mirror = KvIndexMirror(clock=lambda: now[0])
    assert mirror.staleness_s() == math.inf
    mirror.touch(100.0)
    mirror.touch(90.0)
    now[0] = 103.0
    assert mirror.staleness_s() == 3.0


def test_it_is_fast() -> None:
    """64 workers and 4096 blocks: a match takes microseconds, dropping 20,000 blocks does not stall."""
    mirror = KvIndexMirror()
    keys = [key(n) for n in range(1, 4097)]
    for worker in range(64):
        mirror.replace(f"w{worker}", keys[: 64 * (worker + 1)])
    for each in range(5):
        mirror.replace(f"big{each}", map(key, range(20_000)))

    def best(action: object, rounds: int) -> float:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            action()  # type: ignore[operator]
            times.append(time.perf_counter() - start)
        return min(times)

    assert best(lambda: mirror.match(keys[:4096]), 50) < 0.002
    big = iter(range(5))
    assert best(lambda: mirror.drop(f"big{next(big)}"), 5) < 0.002
    assert best(mirror.sweep, 4) < 0.02
