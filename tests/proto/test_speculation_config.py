"""The section `speculation` is read as strictly as the others."""

from __future__ import annotations

import pytest

from kvhive.proto.config import SpeculationConfig, load_config
from kvhive.proto.errors import ConfigError


def test_speculation_is_off_unless_asked_for() -> None:
    assert load_config("").speculation == SpeculationConfig(mode="off")


def test_its_values_are_read() -> None:
    text = "metadata: {kvhive: {speculation: {mode: draft, draft_model: /small, max_drafts: 6}}}"
    assert load_config(text).speculation == SpeculationConfig("draft", max_drafts=6, draft_model="/small")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{mod: ngram}", "speculation.mod: unknown key, did you mean 'mode'?"),
        ("{mode: eagle}", "speculation.mode: must be one of off, ngram, draft, is 'eagle'"),
        ("{max_drafts: 0}", "speculation.max_drafts: must be between 1 and 64, is 0"),
        (
            "{ngram_min: 3, ngram_max: 2}",
            r"speculation.ngram_max: must be at least speculation.ngram_min \(3\)",
        ),
        ("{mode: draft}", "speculation.draft_model: speculation.mode is 'draft', so it must name a model"),
    ],
)
def test_mistakes_are_named(section: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(f"metadata: {{kvhive: {{speculation: {section}}}}}")
