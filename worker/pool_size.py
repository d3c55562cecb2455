"""How many KV blocks a device has room for, found by trying the largest step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvhive.proto.errors import ModelError
from kvhive.worker.forward_batch import LanguageModel
from kvhive.worker.kv_cache import allocate_pool
from kvhive.worker.model_runner import Chunk, ModelShape
from kvhive.worker.step_inputs import StepInputs

_TRIAL_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """How a runner uses a CUDA device."""

    utilization: float
    """The share of the device's memory that weights, the largest step and the pool may take together."""
    max_step_tokens: int
    max_running: int
    graphs: bool = True
    """Decode steps as CUDA graphs. What they and sampling hold comes out of the rest of the memory."""
    deterministic: bool = False
    """Linear layers whose rows do not depend on the batch (kernels/linear.py)."""


def blocks_that_fit(total: int, utilization: float, others: int, peak: int, block_bytes: int) -> int:
    """Return how many blocks fit into a share of a device's memory.

    total:        bytes of the device
    utilization:  the share of it that this worker may use, 0 to 1
    others:       bytes in use that are not this process's tensors: other processes, libraries, contexts
    peak:         bytes of this process's tensors at the height of the largest step, without the pool
    block_bytes:  bytes of one block

    Raises ModelError, with every number, when not even one fits.
    """
    room = int(total * utilization) - others - peak
    if room < block_bytes:
        gib = 2**30
        raise ModelError(
            f"no room for a KV pool: {utilization:.0%} of {total / gib:.1f} GiB "
            f"(workers.gpu_memory_utilization) less {peak / gib:.1f} GiB for the model and its largest step "
            f"and {others / gib:.1f} GiB that others use leaves {max(0, room) / gib:.2f} GiB; "
            "lower workers.max_step_tokens, raise the share, or take a smaller model"
        )
    return room // block_bytes


def measured_blocks(
    model: LanguageModel,
    shape: ModelShape,
    windows: tuple[int | None, ...],
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    memory: DeviceMemory,
) -> int:
    """Run the largest step on a CUDA device and return how many blocks fit beside it.

    Call it under inference_mode: what gradients would keep is not to be counted.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    tokens = min(memory.max_step_tokens, _TRIAL_SEQUENCES * shape.max_context)
    length = -(-tokens // _TRIAL_SEQUENCES)
    blocks = -(-length // block_size)
    pool = allocate_pool(shape, blocks, block_size, dtype, device)
    trial = Chunk([0] * length, 0, range(blocks), None)
    inputs = StepInputs(pool, windows)
    # All write the same blocks: only the memory of the step counts here.
    chunks = [trial] * max(1, tokens // length)
    rows = range(min(len(chunks) * length, memory.max_running))
    model.forward(inputs.lay_out(chunks, rows), pool)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - pool.nbytes
    del pool, inputs
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_allocated(device)
    return blocks_that_fit(total, memory.utilization, max(0, others), peak, shape.block_bytes(block_size))
