"""From a model's files to a runner that computes it."""

from __future__ import annotations

from pathlib import Path

import torch

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.kv_cache import PoolSpec
from kvhive.worker.model_config import read_model_config, resolve_dtype
from kvhive.worker.model_loader import load_model
from kvhive.worker.options import WorkerOptions, pool_blocks
from kvhive.worker.pool_size import DeviceMemory
from kvhive.worker.rank_group import RankGroup
from kvhive.worker.torch_runner import TorchModelRunner
from kvhive.worker.transformers_config import TransformersConfig


def load_runner(
    model_path: Path,
    dtype: str = "float32",
    device: str = "cpu",
    num_blocks: int = 1024,
    block_size: int = 16,
    max_context: int = 0,
    memory: DeviceMemory | None = None,
    kv_dtype: str = "auto",
) -> TorchModelRunner:
    """Load the model onto the device and allocate its pool; the rest is TorchModelRunner's.

    model_path: what model_path.resolve_model returns
    kv_dtype: `auto` keeps KV in the model's dtype, `fp8` in eight bits

    Raises ModelError when the model cannot be loaded or the pool has no room.
    """
    pool = PoolSpec(num_blocks, block_size, kv_dtype)
    return _load(model_path, dtype, device, pool, max_context, memory)


def load_worker_runner(options: WorkerOptions, ranks: RankGroup | None = None) -> TorchModelRunner:
    """Load what a worker computes with, or one of the ranks of a worker. Raises load_runner's errors."""
    memory = DeviceMemory(
        options.gpu_memory_utilization,
        options.max_step_tokens,
        options.max_running,
        options.graphs,
        options.deterministic,
    )
    pool = PoolSpec(pool_blocks(options), options.block_size, options.kv_dtype)
    path = Path(options.model_path)
    return _load(path, options.dtype, options.device, pool, options.max_context, memory, ranks)


def _load(
    path: Path,
    dtype: str,
    device: str,
    pool: PoolSpec,
    max_context: int,
    memory: DeviceMemory | None,
    ranks: RankGroup | None = None,
) -> TorchModelRunner:
    config = read_model_config(path)
    dtype = resolve_dtype(config, dtype, device)
    place = torch_device(device)
    if pool.dtype != "auto" and isinstance(config, TransformersConfig):
        raise ModelError(
            f"{path}: workers.kv_dtype: transformers computes this model, with KV in its own dtype only"
        )
    invariant = memory is not None and memory.deterministic and place.type == "cuda"
    model = load_model(path, config, getattr(torch, dtype), place, invariant, ranks)
    if ranks is not None and isinstance(config, DecoderConfig):
        config = ranks.shard.local(config)
    return TorchModelRunner(model, config, dtype, place, pool, max_context, memory, ranks)


def set_threads(threads: int) -> None:
    """Set the compute threads of this process, which is torch's own setting for all of it; 0 leaves it."""
    if threads:
        torch.set_num_threads(threads)


def torch_device(name: str) -> torch.device:
    """Return the device that a name such as `cpu`, `cuda` or `cuda:1` stands for. Raises ModelError."""
    if name == "cpu":
        return torch.device(name)
    if not name.startswith("cuda"):
        raise ModelError(f"device {name!r} is not supported; cpu and cuda are")
    if not torch.cuda.is_available():
        raise ModelError(f"device {name!r} was asked for, but torch {torch.__version__} sees no CUDA device")
    return torch.device(name if ":" in name else f"{name}:{torch.cuda.current_device()}")
