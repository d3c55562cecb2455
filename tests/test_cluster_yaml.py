"""cluster.yaml is a cluster file for Ray and a configuration for us."""

import json
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
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


SCHEMA = Path(ray.autoscaler.__file__).parent / "ray-schema.json"
DEPLOY = FILE.parent / "docs" / "deploy"


def test_the_file_for_a_cloud_has_room_for_as_many_workers_as_it_asks_for() -> None:
    """Both readers accept it; what Ray itself would fill in needs the cloud."""
    document = yaml.safe_load((DEPLOY / "aws.yaml").read_text())
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    config = load_config((DEPLOY / "aws.yaml").read_text())
    gpu = document["available_node_types"]["gpu"]
    assert config.autoscaling.max_workers == gpu["max_workers"] * gpu["resources"]["GPU"]
    assert config.autoscaling.min_workers <= config.workers.count <= config.autoscaling.max_workers
    assert config.workers.num_cpus <= gpu["resources"]["CPU"] and config.workers.host == "node"


def test_the_manifest_for_kuberay_says_of_kvhive_what_we_read() -> None:
    cluster, settings = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    config = load_config(settings["data"]["cluster.yaml"])
    (gpu,) = cluster["spec"]["workerGroupSpecs"]
    assert config.autoscaling.enabled and config.autoscaling.max_workers == gpu["maxReplicas"]
    assert cluster["spec"]["enableInTreeAutoscaling"]
    assert gpu["template"]["spec"]["terminationGracePeriodSeconds"] > 60, "longer than a drain"
