"""Who inherits what: what begins alike stays together as far as that pays, and nobody gets too much."""

from __future__ import annotations

from kvhive.proto.block_hash import BlockKey
from kvhive.scripts.inheritance import Heir, share_out


def chain(*blocks: str) -> list[BlockKey]:
    return [BlockKey(block.encode()) for block in blocks]


def test_unrelated_chains_spread() -> None:
    chains = [chain(f"{name}1", f"{name}2") for name in "abcd"]
    named = share_out(chains, [Heir("x", 100), Heir("y", 100)])
    assert sorted(named) == ["x", "x", "y", "y"]


def test_a_continuation_goes_where_its_beginning_went() -> None:
    chains = [chain("s1", "s2", "s3", "s4"), chain("t1"), chain("s1", "s2", "s3", "s4", "u1")]
    first, other, again = share_out(chains, [Heir("x", 100), Heir("y", 100)])
    assert first == again != other


def test_a_beginning_that_all_share_does_not_pull_everything_to_one_heir() -> None:
    chains = [chain("s1", *(f"{user}{n}" for n in range(6))) for user in "abcdef"]
    named = share_out(chains, [Heir("x", 100), Heir("y", 100)])
    assert sorted(named) == ["x"] * 3 + ["y"] * 3


def test_what_an_heir_holds_already_costs_it_nothing() -> None:
    (named,) = share_out(
        [chain("a", "b", "c")], [Heir("x", 100), Heir("y", 0, has=set(chain("a", "b", "c")))]
    )
    assert named == "y"


def test_what_fits_nowhere_is_left_and_what_comes_after_it_is_not() -> None:
    heir = Heir("x", 2)
    assert share_out([chain("a", "b", "c"), chain("d", "e"), chain("f")], [heir]) == ["", "x", ""]
    assert heir.promised == 2
    assert share_out([chain("a")], []) == [""]
