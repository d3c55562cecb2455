"""The configuration, as frozen dataclasses that mirror `metadata.kvhive:` in cluster.yaml.

Read strictly: an unknown key, a wrong type or a value outside its limits is a ConfigError that names the
key. `load_config` reads a Ray cluster file (our section is under `metadata.kvhive:`).
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any

import yaml

from kvhive.proto.autoscaling_config import AUTOSCALING_LIMITS, AutoscalingConfig, check_autoscaling
from kvhive.proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served."""

    path: str = "demo"
    """A Hugging Face directory (safetensors), a .gguf file, or `demo`: the installed demo model."""
    name: str = ""
    """The name clients use; by default the file's or directory's own."""
    dtype: str = "auto"
    """`float32`, `bfloat16`, `float16`, `auto`: the checkpoint's on CUDA, on CPUs bfloat16 or float32."""
    max_context: int = 0
    """Most tokens of prompt and output together; 0 means the model's own limit."""


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Blocks that move from worker to worker instead of being computed again."""

    enabled: bool = True
    """Let workers pull blocks from each other where that is faster than computing them."""
    max_concurrent: int = 2
    """Pulls that a worker has under way at once, and as many that it serves."""
    timeout_s: float = 5.0
    """Longest that a pull may take; what has not come by then is computed."""
    stall_timeout_s: float = 2.0
    """Longest that one chunk of a pull may take: how soon a hung worker is noticed."""
    chunk_mib: int = 8
    """Size of a chunk, after which its blocks are usable; over gloo and NCCL also of two buffers per peer."""
    backend: str = "auto"
    """What blocks travel by: `tcp`, `gloo` or `nccl` alone; `auto`: the best that both ends can speak."""


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """The workers: Ray actors, each with one paged KV pool, on one device or on several that share it."""

    count: int = 2
    """How many workers are started and kept, until `kvhive scale`, `kvhive drain` or autoscaling."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda where Ray has GPUs."""
    tensor_parallel: int = 1
    """Ranks that share each worker's model, a device each, on one machine (docs/tensor_parallel.md)."""
    num_cpus: float = 1.0
    """CPUs that Ray reserves for each rank of a worker."""
    num_gpus: float = -1.0
    """GPUs that Ray reserves for each rank of a worker; -1: one with `device: cuda`, else none."""
    threads: int = 0
    """Compute threads per rank; 0 means a fair share of our own head's cores, else `int(num_cpus)`."""
    block_size: int = 16
    """Tokens per KV block; one value per cluster."""
    kv_dtype: str = "auto"
    """`auto` keeps KV in the model's dtype; `fp8` in half the memory, less exactly; slow on a CPU."""
    pool_tokens: int = 0
    """Tokens of each worker's KV pool; 0: what `gpu_memory_utilization` leaves, on a CPU 16384."""
    gpu_memory_utilization: float = 0.9
    """On CUDA: the share of its memory for weights, the largest step and an automatic pool."""
    cuda_graphs: bool = True
    """On CUDA: record decode steps once and replay them, which saves hundreds of launches a step."""
    deterministic: bool = False
    """On CUDA: linear layers whose rows do not depend on the batch, slower; on a CPU float32 has them so."""
    max_step_tokens: int = 512
    """The token budget of one step: decodes first, then prompt chunks."""
    max_running: int = 16
    """Most sequences in one batch."""
    max_waiting: int = 256
    """Most requests waiting for admission; one more is refused with RESOURCE_EXHAUSTED."""
    pin_share: float = 0.5
    """Most of each pool that pins may hold, all tenants' together; 0: none (docs/cache_control.md)."""
    pin_tenant_share: float = 0.25
    """Most of each pool that one tenant's pins may hold."""
    host: str = "127.0.0.1"
    """Address the worker's gRPC service binds; `node` means the node's own IP, for many machines."""
    start_timeout_s: float = 300.0
    """How long `kvhive up` waits for a worker to load its model."""
    warm_s: float = 10.0
    """Longest that a worker that joins is given hot blocks by its peers before it serves; 0: not at all."""
    transfer: TransferConfig = field(default_factory=TransferConfig)


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding in the workers. It changes how fast tokens come, never which."""

    mode: str = "off"
    """`off`, `ngram` (what followed the same tokens earlier) or `draft` (a smaller model guesses)."""
    max_drafts: int = 4
    """Most tokens guessed ahead; each worker tries fewer, or none, where that is faster."""
    draft_model: str = ""
    """For `draft`: path of a model with the same vocabulary; on CUDA set `workers.pool_tokens` too."""
    ngram_min: int = 2
    """For `ngram`: fewest tokens that must have stood there before."""
    ngram_max: int = 4
    """For `ngram`: most tokens that are looked for; the longest match counts."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The front door."""

    host: str = "127.0.0.1"
    """Address both doors bind. Beyond loopback needs `access.keys_file`, or `allow_open: true`."""
    allow_open: bool = False
    """Listen beyond loopback without API keys: whoever reaches the doors is let in."""
    grpc_port: int = 0
    """Port of kvhive.v1; 0 takes a free one."""
    http_port: int = 0
    """Port of the OpenAI-compatible HTTP API; 0 takes a free one."""
    max_concurrent_requests: int = 1024
    """Requests in flight at once; one more is refused (429), a little sooner or later (docs/overload.md)."""
    max_request_bytes: int = 16 * 1024 * 1024
    """Largest request body or gRPC message."""
    queue_timeout_s: float = 300.0
    """Longest a request may wait for its first token; if it is predicted to, it is refused; 0: no limit."""
    max_predicted_ttft_s: float = 0.0
    """Refuse at once what is predicted to wait longer for its first token, on every worker; 0: no limit."""
    policy: str = "kv_aware"
    """`kv_aware`, `round_robin`, `least_loaded`, `power_of_two`, `consistent_hash`, or one of your own."""
    max_failovers: int = 2
    """Most times one stream moves to another worker because its own was lost; one that drains is not."""
    failure_cooldown_s: float = 5.0
    """How long a worker that failed a request is skipped."""
    index: str = "auto"
    """Where prefixes are looked up: `mirror` (in the router), `redis`, or `auto`: mirror while small."""
    index_mirror_blocks: int = 10_000_000
    """With `router.index: auto`: blocks of all workers (about 150 bytes each) beyond which Redis is asked."""
    index_stale_after_s: float = 30.0
    """Beyond this age the mirror of the index is ignored and requests go by load and rendezvous hashing."""
    predicted_ttl_s: float = 30.0
    """How long blocks that a just-routed request will create count before they are confirmed."""
    template_timeout_s: float = 2.0
    """Longest a chat template may take to render."""
    min_pinned_tokens: int = 0
    """Shortest prefix that is pinned; what is shorter is reported as below_minimum. A block at least."""
    tool_format: str = "auto"
    """How the model writes calls of tools: one of docs/tools.md, `none`, or `auto`, by its chat template."""


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Who may ask. (Ray has an `auth` of its own in the same file.)"""

    keys_file: str = ""
    """API keys (`kvhive keys`, docs/security.md), read again when it changes; empty: everybody may ask."""


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Where the index lives."""

    url: str = field(default="", repr=False)  # it may hold a password
    """See proto/redis_url.py for its forms; empty starts an embedded server that stops with the cluster."""
    lease_s: float = 5.0
    """A worker that is silent for this long leaves the index."""
    heartbeat_s: float = 0.5
    """How often a worker renews its lease and reports its load."""
    timeout_s: float = 2.0
    """Longest any one command may take."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Everything under `metadata.kvhive:`."""

    cluster: str = "default"
    """Name of the cluster; part of every Redis key and of the state file."""
    cache_salt: str = ""
    """Cluster-wide salt of every block hash."""
    model: ModelConfig = field(default_factory=ModelConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)


_CHOICES = {
    "router.index": ("auto", "mirror", "redis"),
    "model.dtype": ("auto", "float32", "bfloat16", "float16"),
    "workers.device": ("auto", "cpu", "cuda"),
    "workers.kv_dtype": ("auto", "fp8"),
    "workers.transfer.backend": ("auto", "tcp", "gloo", "nccl"),
    "speculation.mode": ("off", "ngram", "draft"),
}
_LIMITS: dict[str, tuple[float, float]] = {
    "model.max_context": (0, 10_000_000),
    "workers.count": (0, 10_000),
    "workers.tensor_parallel": (1, 64),
    "workers.num_cpus": (0, 1024),
    "workers.threads": (0, 1024),
    "workers.block_size": (1, 1024),
    "workers.pool_tokens": (0, 1_000_000_000),
    "workers.gpu_memory_utilization": (0.05, 0.99),
    "workers.max_step_tokens": (1, 1_000_000),
    "workers.max_running": (1, 4096),
    "workers.max_waiting": (0, 1_000_000),
    "workers.start_timeout_s": (1, 86_400),
    "workers.pin_share": (0, 0.9),
    "workers.pin_tenant_share": (0, 0.9),
    "workers.num_gpus": (-1, 16),
    "workers.warm_s": (0, 600),
    "workers.transfer.max_concurrent": (1, 64),
    "workers.transfer.timeout_s": (0.1, 600),
    "workers.transfer.stall_timeout_s": (0.1, 60),
    "workers.transfer.chunk_mib": (1, 64),
    "speculation.max_drafts": (1, 64),
    "speculation.ngram_min": (1, 64),
    "speculation.ngram_max": (1, 64),
    "router.grpc_port": (0, 65_535),
    "router.http_port": (0, 65_535),
    "router.max_concurrent_requests": (1, 1_000_000),
    "router.max_request_bytes": (1024, 2**31 - 1),
    "router.queue_timeout_s": (0, 86_400),
    "router.max_predicted_ttft_s": (0, 86_400),
    "router.max_failovers": (0, 100),
    "router.failure_cooldown_s": (0, 3600),
    "router.index_mirror_blocks": (0, 1_000_000_000),
    "router.index_stale_after_s": (0.1, 86_400),
    "router.predicted_ttl_s": (0, 3600),
    "router.template_timeout_s": (0.01, 60),
    "router.min_pinned_tokens": (0, 10_000_000),
    **AUTOSCALING_LIMITS,
    "redis.lease_s": (0.5, 3600),
    "redis.heartbeat_s": (0.05, 600),
    "redis.timeout_s": (0.05, 60),
}
_CLUSTER_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


def load_config(text: str) -> ClusterConfig:
    """Read our section of a Ray cluster file. A file without one means all defaults. Raises ConfigError."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from error
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError("the file must be a mapping")
    # An empty value means that nothing is set; an empty list or string is a mistake.
    metadata = document.get("metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise ConfigError(f"metadata: must be a mapping, is {type(metadata).__name__}")
    _check_place(document, metadata)
    section = metadata.get("kvhive")
    return parse_config({} if section is None else section)


def parse_config(section: object) -> ClusterConfig:
    """Build the configuration from a plain mapping. Raises ConfigError."""
    config = _build(ClusterConfig, section, "")
    assert isinstance(config, ClusterConfig)
    _check(config)
    return config


def to_mapping(config: ClusterConfig) -> dict[str, Any]:
    """Return the plain mapping that parse_config reads back to an equal configuration."""
    return dataclasses.asdict(config)


def check_cluster_name(name: str) -> str:
    """Return the name if it can be a cluster's, that is part of paths and keys. Raises ConfigError."""
    if not _CLUSTER_NAME.fullmatch(name):
        raise ConfigError(
            f"cluster: must be 1 to 40 of a-z, 0-9 and '-', starting with a letter or digit; is {name!r}"
        )
    return name


def is_loopback(host: str) -> bool:
    """Whether a host name or address surely stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def _check_place(document: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Refuse a section where nobody would read it: beside `metadata`, or under a misspelt name."""
    ours = {"kvhive", *(field.name for field in dataclasses.fields(ClusterConfig))}
    for key in document:
        if key in ours:
            raise ConfigError(f"{key}: belongs under metadata.kvhive, is at the top of the file")
    for key in metadata:
        if key != "kvhive" and difflib.get_close_matches(str(key).lower(), ["kvhive"], cutoff=0.75):
            raise ConfigError(f"metadata.{key}: unknown key, did you mean 'kvhive'?")


def _build(cls: type, section: object, path: str) -> object:
    if not isinstance(section, dict):
        raise ConfigError(f"{path or 'kvhive'}: must be a mapping, is {type(section).__name__}")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    values = {}
    for key, value in section.items():
        name = f"{path}.{key}" if path else str(key)
        if key not in known:
            raise ConfigError(_unknown_key(name, str(key), known))
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _build(typing.cast(type, hint), {} if value is None else value, name)
        else:
            values[key] = _scalar(hint, value, name)
    return cls(**values)


def _unknown_key(name: str, key: str, known: set[str]) -> str:
    nearest = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)
    return f"{name}: unknown key, did you mean {nearest[0]!r}?"


def _scalar(hint: Any, value: object, name: str) -> object:
    assert not isinstance(hint, types.UnionType), f"{name}: unions have no place in the configuration"
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint:
        raise ConfigError(f"{name}: must be {hint.__name__}, is {type(value).__name__} ({value!r})")
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ConfigError(f"{name}: must be one of {', '.join(_CHOICES[name])}, is {value!r}")
    if name in _LIMITS:
        low, high = _LIMITS[name]
        if not low <= typing.cast(float, value) <= high:  # also refuses NaN
            raise ConfigError(f"{name}: must be between {low:g} and {high:g}, is {value!r}")
    return value


def _check(config: ClusterConfig) -> None:
    check_cluster_name(config.cluster)
    workers = config.workers
    if 0 < workers.pool_tokens < 2 * workers.block_size:
        raise ConfigError(
            f"workers.pool_tokens: must hold at least 2 blocks of {workers.block_size} tokens, "
            f"is {workers.pool_tokens}"
        )
    _check_speculation(config.speculation)
    check_autoscaling(config.autoscaling, workers.count)
    if workers.host in ("0.0.0.0", "::", ""):
        raise ConfigError(
            f"workers.host: {workers.host!r} is no address that a router can reach; "
            "`node` means each node's own"
        )
    if config.redis.heartbeat_s * 2 > config.redis.lease_s:
        raise ConfigError(
            f"redis.lease_s: must be at least twice redis.heartbeat_s ({config.redis.heartbeat_s:g}), "
            f"is {config.redis.lease_s:g}"
        )
    if not (is_loopback(config.router.host) or config.access.keys_file or config.router.allow_open):
        raise ConfigError(
            f"router.host: {config.router.host!r} is beyond loopback and there are no API keys: set "
            "access.keys_file, or router.allow_open: true to let everybody in"
        )


def _check_speculation(speculation: SpeculationConfig) -> None:
    if speculation.ngram_min > speculation.ngram_max:
        raise ConfigError(
            f"speculation.ngram_max: must be at least speculation.ngram_min ({speculation.ngram_min}), "
            f"is {speculation.ngram_max}"
        )
    if speculation.mode == "draft" and not speculation.draft_model:
        raise ConfigError("speculation.draft_model: speculation.mode is 'draft', so it must name a model")
