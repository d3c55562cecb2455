"""cluster.yaml is read strictly: whatever is wrong is named."""

from __future__ import annotations

import re

import pytest

from kvhive.proto.config import ClusterConfig, load_config, parse_config, to_mapping
from kvhive.proto.errors import ConfigError


def test_a_file_without_our_section_means_defaults() -> None:
    assert load_config("cluster_name: x\nmax_workers: 3\n") == ClusterConfig()
    assert load_config("") == ClusterConfig()
    for empty in ("metadata:", "metadata: {}", "metadata: {kvhive: }", "metadata: {kvhive: {workers: }}"):
        assert load_config(empty) == ClusterConfig()


def test_values_are_read() -> None:
    config = load_config("metadata: {kvhive: {workers: {count: 4, num_cpus: 2}, redis: {url: 'redis://h'}}}")
    assert (config.workers.count, config.workers.num_cpus, config.redis.url) == (4, 2.0, "redis://h")


def test_a_configuration_survives_the_round_trip() -> None:
    config = load_config("metadata: {kvhive: {cluster: prod-1, router: {http_port: 8000}}}")
    assert parse_config(to_mapping(config)) == config


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{worker: {}}", "worker: unknown key, did you mean 'workers'?"),
        ("{workers: {blok_size: 16}}", "workers.blok_size: unknown key, did you mean 'block_size'?"),
        ("{workers: {count: '2'}}", "workers.count: must be int, is str ('2')"),
        ("{workers: {count: true}}", "workers.count: must be int, is bool (True)"),
        (
            "{workers: {tensor_parallel: 0}}",
            "workers.tensor_parallel: must be between 1 and 64, is 0",
        ),
        ("{workers: {count: -1}}", "workers.count: must be between 0 and 10000, is -1"),
        ("{workers: {device: gpu}}", "workers.device: must be one of auto, cpu, cuda, is 'gpu'"),
        ("{workers: [1]}", "workers: must be a mapping, is list"),
        ("{redis: {lease_s: .nan}}", "redis.lease_s: must be between 0.5 and 3600, is nan"),
        ("{redis: {heartbeat_s: 4}}", "redis.lease_s: must be at least twice redis.heartbeat_s (4), is 5"),
        ("{cluster: 'a:b'}", "cluster: must be 1 to 40 of a-z, 0-9 and '-'"),
        (
            "{workers: {pool_tokens: 16}}",
            "workers.pool_tokens: must hold at least 2 blocks of 16 tokens, is 16",
        ),
        ("{router: {host: 0.0.0.0}}", "router.host: '0.0.0.0' is beyond loopback and there are no API keys"),
        ("{router: {host: localhost.example}}", "router.host: 'localhost.example' is beyond loopback"),
        ("{router: {host: '::'}}", "router.host: '::' is beyond loopback"),
        ("[]", "kvhive: must be a mapping, is list"),
        ("''", "kvhive: must be a mapping, is str"),
        ("0", "kvhive: must be a mapping, is int"),
        ("false", "kvhive: must be a mapping, is bool"),
    ],
)
def test_what_is_wrong_is_named(section: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(f"metadata: {{kvhive: {section}}}")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "the file must be a mapping"),
        ("[]", "the file must be a mapping"),
        ("metadata: 3", "metadata: must be a mapping, is int"),
        ("metadata: []", "metadata: must be a mapping, is list"),
        ("metadata: ''", "metadata: must be a mapping, is str"),
        ("a: [", "not valid YAML: "),
        ("kvhive: {cluster: blue}", "kvhive: belongs under metadata.kvhive"),
        ("workers: {count: 3}", "workers: belongs under metadata.kvhive"),
        ("metadata: {kvhve: {cluster: blue}}", "metadata.kvhve: unknown key, did you mean 'kvhive'?"),
        ("metadata: {kvhive: {workers: {count: 1e400}}}", "workers.count: must be int, is str ('1e400')"),
    ],
)
def test_a_file_of_another_shape_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(text)
    assert str(error.value).startswith(message)


def test_the_section_of_transfers_is_read_as_strictly_as_the_others() -> None:
    config = parse_config({"workers": {"transfer": {"enabled": False, "timeout_s": 2}}})
    assert (config.workers.transfer.enabled, config.workers.transfer.timeout_s) == (False, 2.0)
    assert parse_config(to_mapping(config)) == config
    for section, message in (
        ({"chunk": 4}, "workers.transfer.chunk: unknown key, did you mean 'chunk_mib'"),
        ({"chunk_mib": 0}, "workers.transfer.chunk_mib: must be between 1 and 64, is 0"),
        ({"backend": "udp"}, "workers.transfer.backend: must be one of auto, tcp, gloo, nccl, is 'udp'"),
        ({"enabled": 1}, "workers.transfer.enabled: must be bool, is int"),
        ([], "workers.transfer: must be a mapping, is list"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse_config({"workers": {"transfer": section}})


def test_the_bounds_for_the_number_of_workers_must_leave_a_number() -> None:
    with pytest.raises(ConfigError, match=r"autoscaling.max_workers: must be at least .* \(9\), is 8"):
        parse_config({"autoscaling": {"min_workers": 9}})
    with pytest.raises(
        ConfigError, match=r"autoscaling.ttft_goal_share: must be between 0.5 and 0.9999, is 1.0"
    ):
        parse_config({"autoscaling": {"ttft_goal_share": 1}})


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (5, r"workers.count: must be at most autoscaling.max_workers \(4\) .*, is 5"),
        (1, r"workers.count: must be at least autoscaling.min_workers \(2\) .*, is 1"),
    ],
)
def test_a_start_begins_within_the_bounds_that_autoscaling_keeps(count: int, message: str) -> None:
    scaling = {"min_workers": 2, "max_workers": 4}
    with pytest.raises(ConfigError, match=message):
        parse_config({"workers": {"count": count}, "autoscaling": {**scaling, "enabled": True}})
    assert parse_config({"workers": {"count": count}, "autoscaling": scaling}).workers.count == count


@pytest.mark.parametrize("allowed", ["{access: {keys_file: keys}}", "{router: {allow_open: true}}"])
def test_listening_beyond_loopback_takes_keys_or_a_word(allowed: str) -> None:
    config = load_config(f"metadata: {{kvhive: {allowed}}}")
    section = to_mapping(config)
    section["router"]["host"] = "0.0.0.0"
    assert parse_config(section).router.host == "0.0.0.0"
