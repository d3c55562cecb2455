"""What a worker is told when it is created."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhive.proto.config import SpeculationConfig, TransferConfig
from kvhive.proto.token_vocabulary import VocabularyLoader


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Everything a worker needs to know; plain values and functions of modules: it travels to any node."""

    worker_id: str
    cluster: str
    model_path: str
    model_name: str
    redis_url: str = field(repr=False)
    cluster_token: str = field(repr=False)
    dtype: str = "float32"
    kv_dtype: str = "auto"
    device: str = "cpu"
    tensor_parallel: int = 1
    block_size: int = 16
    pool_tokens: int = 0
    gpu_memory_utilization: float = 0.9
    graphs: bool = True
    deterministic: bool = False
    max_step_tokens: int = 512
    max_running: int = 16
    max_waiting: int = 256
    max_context: int = 0
    pin_share: float = 0.5
    pin_tenant_share: float = 0.25
    threads: int = 1
    host: str = "127.0.0.1"
    warm_s: float = 0.0
    """Longest that it waits, loaded, to be warmed and told to serve; 0: it serves at once."""
    cluster_salt: str = ""
    lease_s: float = 5.0
    heartbeat_s: float = 0.5
    redis_timeout_s: float = 2.0
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    load_vocabulary: VocabularyLoader | None = None
    """How it learns what its tokens stand for, which grammars must know; None: it follows no grammar."""
    emulated_bytes_per_s: float = 0.0
    """For measurements: what this worker sends is held back to that many; 0 is as fast as it goes."""
    emulated_delay_s: float = 0.0
    """... and begins so much later."""


CPU_POOL_TOKENS = 16384
"""What `pool_tokens: 0` is on a CPU, whose memory others live in too."""


def pool_blocks(options: WorkerOptions) -> int:
    """Return the blocks of the pool; 0 where a CUDA device's memory decides."""
    tokens = options.pool_tokens
    if not tokens and not options.device.startswith("cuda"):
        tokens = CPU_POOL_TOKENS
    return tokens // options.block_size
