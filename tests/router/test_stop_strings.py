"""Stop strings cut at the match that completes first, whatever the chunking, and delay nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhive.router.stop_strings import StopStringMatcher


def oracle(stops: list[str], text: str) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def held(stops: list[str], text: str) -> int:
    return max((k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])), default=0)


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=5),
    chunks=st.lists(st.text("ab\n", max_size=5), max_size=12),
)
def test_against_the_naive_way(stops: list[str], chunks: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    emitted, stopped, seen = "", False, ""
    for chunk in chunks:
        seen += chunk
        piece, stopped = matcher.push(chunk)
        emitted += piece
        if stopped:
            break
        assert len(seen) - len(emitted) == held(stops, seen)
    if not stopped:
        emitted += matcher.flush()
    assert (emitted, stopped) == oracle(stops, seen)


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    before=st.lists(st.text("ab", max_size=4), max_size=6),
    after=st.lists(st.text("ab", max_size=4), max_size=6),
)
def test_while_the_output_may_not_end_a_stop_is_text(
    stops: list[str], before: list[str], after: list[str]
) -> None:
    """One that is completed later counts, also where it began before."""
    matcher = StopStringMatcher(stops)
    early, text = "".join(before), "".join(before + after)
    emitted = "".join(matcher.push(chunk, may_end=False)[0] for chunk in before)
    assert len(early) - len(emitted) == held(stops, early)
    stopped = False
    for chunk in after:
        piece, stopped = matcher.push(chunk)
        emitted += piece
    emitted += "" if stopped else matcher.flush()
    ends = [e for e in range(len(early) + 1, len(text) + 1) if any(text[:e].endswith(s) for s in stops)]
    cut = ends[0] - max(len(s) for s in stops if text[: ends[0]].endswith(s)) if ends else len(text)
    assert stopped == bool(ends) and emitted[:cut] == text[:cut]
    assert len(emitted) == max(cut, len(early) - held(stops, early) if ends else 0)


def test_an_unrelated_long_stop_delays_nothing() -> None:
    matcher = StopStringMatcher(["#" * 60])
    assert matcher.push("Hello") == ("Hello", False)
    assert matcher.push(" #") == (" ", False)
    assert matcher.push("1") == ("#1", False)


def test_held_text_is_delivered_at_the_end() -> None:
    matcher = StopStringMatcher(["end@@@"])
    assert matcher.push("the end") == ("the ", False)
    assert matcher.flush() == "end"
    assert matcher.flush() == ""


def test_a_stop_split_over_pushes_and_what_follows_it() -> None:
    matcher = StopStringMatcher(["STOP"])
    assert matcher.push("a ST") == ("a ", False)
    assert matcher.push("OP b") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_the_stop_that_completes_first_wins_and_then_the_longest() -> None:
    assert StopStringMatcher(["abcdef", "cd"]).push("abcdef") == ("ab", True)
    assert StopStringMatcher(["cd", "bcd"]).push("abcdef") == ("a", True)


def test_no_stops_pass_everything() -> None:
    matcher = StopStringMatcher([])
    assert matcher.push("x") == ("x", False)
    assert matcher.flush() == ""


def test_repetitive_text_and_stop_are_linear() -> None:
    matcher = StopStringMatcher(["a" * 255 + "b"] * 16)
    emitted, stopped = matcher.push("a" * 100_000)
    assert (len(emitted), stopped) == (100_000 - 255, False)


def test_an_empty_stop_is_a_programming_error() -> None:
    with pytest.raises(AssertionError):
        StopStringMatcher([""])
