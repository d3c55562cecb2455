"""cluster.yaml is a cluster file for Ray and a configuration for us."""

from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from kvhive.proto.config import ClusterConfig, load_config
from kvhive.proto.errors import ConfigError

FILE = Path(__file__).resolve().parents[1] / "cluster.yaml"


def test_ray_accepts_the_file_and_keeps_our_section() -> None:
    prepared = prepare_config(yaml.safe_load(FILE.read_text()))
    validate_config(prepared)
    assert prepared["metadata"]["kvhive"]["workers"]["count"] == 2


def test_ray_would_refuse_our_section_at_the_top_level() -> None:
    document = yaml.safe_load(FILE.read_text())
    with pytest.raises(Exception, match="kvhive"):
        validate_config(prepare_config({**document, "kvhive": document["metadata"]["kvhive"]}))


def test_we_read_the_file_and_it_spells_out_the_defaults() -> None:
    assert load_config(FILE.read_text()) == ClusterConfig()


def test_a_typing_error_in_the_file_is_refused_with_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"workers.cout: unknown key, did you mean 'count'"):
        load_config(FILE.read_text().replace("count: 2", "cout: 2"))
