"""The grace of a stop crosses from `kvhive down` to the router in a file, and is always a sane number."""

from pathlib import Path

import pytest

from kvhive.scripts.stop_grace import DEFAULT_GRACE_S, LONGEST_GRACE_S, read_grace, set_grace


@pytest.mark.parametrize("grace_s", [0.0, 0.5, 20.0])
def test_what_was_set_is_read(tmp_path: Path, grace_s: float) -> None:
    set_grace(tmp_path, 7.0)
    set_grace(tmp_path, grace_s)
    assert read_grace(tmp_path) == grace_s
    assert [path.name for path in tmp_path.iterdir()] == ["grace"]


@pytest.mark.parametrize("text", [None, "", "soon", "nan"])
def test_without_a_number_it_is_the_default(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "grace").write_text(text)
    assert read_grace(tmp_path) == DEFAULT_GRACE_S


@pytest.mark.parametrize(("text", "grace_s"), [("-1", 0.0), ("inf", LONGEST_GRACE_S)])
def test_it_is_bounded(tmp_path: Path, text: str, grace_s: float) -> None:
    (tmp_path / "grace").write_text(text)
    assert read_grace(tmp_path) == grace_s


def test_a_runtime_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    set_grace(tmp_path / "gone", 1.0)
    assert list(tmp_path.iterdir()) == []
