"""Drafts are what followed the longest latest n-gram; the index follows the sequence and is bounded."""

from __future__ import annotations

import random
import time

import pytest

from kvhive.worker.model_runner import Chunk
from kvhive.worker.ngram_drafter import NgramDrafter
from kvhive.worker.sequence import SamplingParams

GREEDY = SamplingParams(max_tokens=100)


def chunk(history: list[int], max_drafts: int = 4) -> Chunk:
    return Chunk(history[-1:], len(history) - 1, [], GREEDY, history=history, max_drafts=max_drafts)


def propose(history: list[int], max_drafts: int = 4, shortest: int = 2, longest: int = 4) -> list[int]:
    (drafts,) = NgramDrafter(shortest, longest).propose([chunk(history, max_drafts)])
    return drafts


def reference(history: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """The meaning, in the plainest words."""
    for length in range(longest, shortest - 1, -1):
        for position in range(len(history) - 1, length - 1, -1):
            if len(history) >= length and history[position - length : position] == history[-length:]:
                grown = list(history)
                for source in range(position, position + count):
                    grown.append(grown[source])
                return grown[len(history) :]
    return []


def test_what_followed_the_same_tokens_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5, 9]
    assert propose([1, 2, 3, 4, 5, 9, 1, 2], max_drafts=2) == [3, 4]


def test_nothing_is_proposed_where_nothing_repeats() -> None:
    assert propose([1, 2, 3, 4, 5]) == []
    assert propose([1, 2, 3, 4, 9, 2]) == [], "one token is no n-gram of two"
    assert propose([7]) == []


def test_the_longest_match_counts_and_of_equals_the_latest() -> None:
    assert propose([1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3], max_drafts=1) == [50]
    assert propose([2, 3, 50, 9, 2, 3, 60, 7, 2, 3], max_drafts=1) == [60]


def test_a_short_period_is_repeated_as_often_as_is_asked_for() -> None:
    assert propose([5, 1, 2, 1, 2, 1, 2], max_drafts=5) == [1, 2, 1, 2, 1]
    assert propose([4, 4, 4], max_drafts=6) == [4] * 6


def test_a_chunk_that_wants_no_drafts_gets_none() -> None:
    history = [1, 2, 3, 1, 2]
    prefill = Chunk([1, 2], 0, [], None)
    assert NgramDrafter().propose([prefill, chunk(history, 0), chunk(history, 2)]) == [[], [], [3, 1]]


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 4), (1, 3), (3, 3)])
def test_growing_sequences_are_indexed_like_fresh_ones(shortest: int, longest: int) -> None:
    """One drafter over several interleaved sequences, each asked now and then, equals the reference."""
    rng = random.Random(7)
    drafter = NgramDrafter(shortest, longest)
    histories: list[list[int]] = [[rng.randrange(4)] for _ in range(3)]
    for _ in range(400):
        history = rng.choice(histories)
        history.extend(rng.randrange(4) for _ in range(rng.randint(1, 3)))
        if rng.random() < 0.5:
            (drafts,) = drafter.propose([chunk(history, 5)])
            assert drafts == reference(history, 5, shortest, longest)


def test_a_sequence_that_comes_as_another_object_is_still_right() -> None:
    drafter = NgramDrafter()
    for _ in range(5):
        assert drafter.propose([chunk([1, 2, 3, 1, 2])]) == [[3, 1, 2, 3]]


def test_memory_is_bounded_and_a_dropped_sequence_is_indexed_again() -> None:
    drafter = NgramDrafter(max_indexed_tokens=100)
    histories = [[i, i + 1, i + 2, i, i + 1] * 6 for i in range(0, 300, 3)]
    for _ in range(2):
        for history in histories:
            (drafts,) = drafter.propose([chunk(history, 1)])
            assert drafts == [history[0]]
            assert drafter.indexed_tokens <= 100
    assert drafter.propose([chunk([1, 2] * 200, 2)]) == [[1, 2]], "one longer than the bound still drafts"
    assert drafter.indexed_tokens == 0


def test_a_token_costs_the_same_in_a_long_sequence() -> None:
    """Asked after every token, 8 times the tokens take 8 times the time and not 64 (20: a shared machine)."""
    rng = random.Random(1)

    def seconds(length: int) -> float:
        drafter, history, began = NgramDrafter(), [0], time.perf_counter()
        for _ in range(length):
            history.append(rng.randrange(50_000))
            drafter.propose([chunk(history, 4)])
        return time.perf_counter() - began

    short = min(seconds(1000) for _ in range(5))
    assert min(seconds(8000) for _ in range(3)) < 20 * short


def test_lengths_that_mean_nothing_are_refused() -> None:
    for shortest, longest in ((0, 3), (3, 2)):
        with pytest.raises(ValueError, match="1 <= shortest <= longest"):
            NgramDrafter(shortest, longest)
