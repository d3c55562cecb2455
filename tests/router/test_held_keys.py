"""What a worker holds is a set in a list's memory: equal to a set's content, and never twice as long."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvhive.proto.block_hash import BlockKey
from kvhive.router.held_keys import HeldKeys


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


numbers = st.sets(st.integers(0, 20))


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), numbers), max_size=60))
def test_it_equals_a_set(steps: list[tuple[str, set[int]]]) -> None:
    held, truth = HeldKeys(), set[int]()
    for action, some in steps:
        if action == "add":
            held.add([key(number) for number in some - truth])
            truth |= some
        else:
            held.remove([key(number) for number in some & truth])
            truth -= some
        assert sorted(held) == [key(number) for number in sorted(truth)]
        assert len(held) == len(truth)


@given(st.lists(st.tuples(numbers, numbers), max_size=30), st.integers(1, 5))
def test_all_that_is_held_comes_out_in_slices(steps: list[tuple[set[int], set[int]]], slice_: int) -> None:
    held, truth = HeldKeys(), set[int]()
    for added, removed in steps:
        held.add([key(number) for number in added - truth])
        truth |= added
        held.remove([key(number) for number in removed & truth])
        truth -= removed
    out: list[BlockKey] = []
    while part := held.pop(slice_):
        assert len(part) <= slice_
        out += part
    assert len(out) == len(set(out))
    assert {key(number) for number in truth} <= set(out)
    assert len(held) == held.listed() == 0


def test_what_has_gone_is_forgotten_as_fast_as_it_goes() -> None:
    """1000 blocks held, 100,000 replaced: the oldest first, the youngest first, the same few, any."""
    for which in ("oldest", "youngest", "few", "chance"):
        held, rng = HeldKeys(), random.Random(1)
        present = [key(number) for number in range(1000)]
        held.add(present)
        for number in range(1000, 101_000, 10):
            at = {"oldest": 0, "youngest": len(present) - 10, "few": 500, "chance": rng.randrange(990)}[which]
            gone, present[at : at + 10] = present[at : at + 10], []
            held.remove(gone)
            new = gone if which == "few" else [key(number + i) for i in range(10)]
            held.add(new)
            present[at:at] = new if which == "few" else []
            present += [] if which == "few" else new
            assert held.listed() <= 2 * len(held) + 20, which
        assert set(held) == set(present)
