"""bfloat16 is chosen by what the CPU says of itself, and float32 where it says nothing."""

from pathlib import Path

import pytest

from kvhive.worker.cpu_features import has_bfloat16


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("model name\t: a\nflags\t\t: fpu avx2 avx512_bf16 sse\n", True),
        ("flags\t\t: fpu amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags\t\t: fpu avx2 avx512f\nmodel name\t: bf16\n", False),
        ("", False),
    ],
)
def test_the_flags_of_every_maker_are_known(tmp_path: Path, text: str, found: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert has_bfloat16(tmp_path / "cpuinfo") is found


def test_a_machine_that_says_nothing_gets_float32(tmp_path: Path) -> None:
    assert has_bfloat16(tmp_path / "absent") is False
