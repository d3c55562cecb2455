"""Predicted blocks: they extend a confirmed match until confirmed, timed out, or pushed out."""

from __future__ import annotations

from kvhive.proto.block_hash import BlockKey
from kvhive.router.predicted_blocks import PredictedBlocks


def chain(length: int, start: int = 0) -> list[BlockKey]:
    return [BlockKey(n.to_bytes(16, "big")) for n in range(start, start + length)]


def test_a_prediction_extends_what_is_confirmed() -> None:
    """It walks on from the confirmed length, and only at the worker it was made for."""
    predicted, keys = PredictedBlocks(ttl_s=10), chain(8)
    predicted.add("w1", keys[:6], now=0)
    assert predicted.extend_match("w1", keys, 0, now=1) == 6
    assert predicted.extend_match("w1", keys, 4, now=1) == 6
    assert predicted.extend_match("w1", keys, 7, now=1) == 7
    assert predicted.extend_match("w1", keys[:3], 0, now=1) == 3
    assert predicted.extend_match("w2", keys, 0, now=1) == 0
    assert predicted.extend_match("w1", [], 0, now=1) == 0


def test_it_times_out_and_can_be_renewed() -> None:
    """After the ttl it counts no more, unless predicted again."""
    predicted, keys = PredictedBlocks(ttl_s=10), chain(4)
    predicted.add("w1", keys, now=0)
    predicted.add("w1", keys[:2], now=5)
    assert predicted.extend_match("w1", keys, 0, now=9.9) == 4
    assert predicted.extend_match("w1", keys, 0, now=10) == 2
    predicted.add("w2", chain(1, 100), now=20)
    assert len(predicted) == 1


def test_forgetting() -> None:
    """Confirmed blocks, failed requests and lost workers are forgotten; unknown ones do no harm."""
    predicted, keys = PredictedBlocks(ttl_s=10), chain(4)
    predicted.add("w1", keys, now=0)
    predicted.add("w2", keys, now=0)
    predicted.forget("w1", keys[2:])
    predicted.forget("w9", keys)
    assert predicted.extend_match("w1", keys, 0, now=1) == 2
    assert predicted.extend_match("w1", keys, 3, now=1) == 3
    predicted.drop("w2")
    predicted.drop("w2")
    assert predicted.extend_match("w2", keys, 0, now=1) == 0
    assert len(predicted) == 2
    predicted.forget("w1", keys)
    assert len(predicted) == 0


def test_the_bound_takes_the_oldest_and_tails_first() -> None:
    """50,000 prompts leave the map at its limit, and what is left still begins at the root."""
    predicted = PredictedBlocks(ttl_s=1e9, max_entries=100)
    for n in range(50_000):
        predicted.add("w1", chain(8, 8 * n), now=n)
    assert len(predicted) == 100
    assert predicted.extend_match("w1", chain(8, 8 * 49_999), 0, now=50_000) == 8
    assert predicted.extend_match("w1", chain(8, 0), 0, now=50_000) == 0
    predicted.add("w1", chain(98, 10**6), now=50_001)
    predicted.add("w1", chain(5, 2 * 10**6), now=50_002)
    assert predicted.extend_match("w1", chain(98, 10**6), 0, now=50_003) == 95
    predicted.drop("w1")
    assert len(predicted) == 0


def test_it_names_only_those_whose_match_grows() -> None:
    predicted, keys = PredictedBlocks(ttl_s=10), chain(8)
    predicted.add("w1", keys[:6], now=0)
    predicted.add("w2", keys[4:], now=0)
    predicted.add("w3", chain(8, 100), now=0)
    assert dict(predicted.extend(keys, {"w2": 4, "w4": 3}, now=1)) == {"w1": 6, "w2": 8}
    assert dict(predicted.extend(keys, {"w1": 8}, now=1)) == {}
    assert dict(predicted.extend(keys, {}, now=11)) == {"w1": 0}, "expired, and not yet taken off"
    assert dict(predicted.extend([], {}, now=1)) == {}
