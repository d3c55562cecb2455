"""The soak of transfers, small: real workers in processes that are struck in the middle of pulls."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from kvhive.scripts import soak_transfer


@pytest.mark.timeout(300)
def test_workers_that_are_struck_in_the_middle_of_pulls_answer_right_and_leak_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults 80 and 82, with source processes that are killed and hung."""
    monkeypatch.setattr(soak_transfer, "FAULTS", ("kill", "stop"))
    told: list[str] = []
    result = soak_transfer.soak(16, 2, "ci", lambda subject, text: told.append(text))
    assert result["violations"] == []
    assert result["pulls"] == 16 and sum(result["faults"].values()) == 2
    assert result["outcomes"].get("pulled", 0) >= 8, "hardly anything was pulled"
    assert result["pulled_tokens"] > 0 and result["other_requests"] > 0
    assert told[-1] == "pulls 16 of 16, faults 2"


def test_more_faults_than_pulls_are_refused() -> None:
    result = CliRunner().invoke(soak_transfer.main, ["--pulls", "3", "--faults", "4"])
    assert result.exit_code == 2
    assert "--faults: must be at most --pulls (3), is 4" in result.output
