"""The model runner that computes: a model, its KV pool and the sampler, on one device."""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly
from itertools import accumulate, chain
from pathlib import Path

import torch

from kvhive.kernels.attention_metadata import attention_metadata
from kvhive.proto.errors import ModelError
from kvhive.worker.forward_batch import ForwardBatch
from kvhive.worker.kv_cache import allocate_pool
from kvhive.worker.model_config import DTYPES, read_model_config, resolve_dtype
from kvhive.worker.model_loader import load_model
from kvhive.worker.model_runner import Chunk, ChunkResult, ModelShape
from kvhive.worker.sampler import counts_history, logit_offsets, read_results


class TorchModelRunner:
    """Implements ModelRunner. Owns the pool: nothing else writes to it, and it starts as zeros."""

    def __init__(
        self,
        model_path: Path,
        dtype: str = "auto",
        device: str = "cpu",
        num_blocks: int = 1024,
        block_size: int = 16,
        threads: int = 0,
        max_context: int = 0,
    ) -> None:
        """Load the model and allocate the pool.

        model_path: what model_path.resolve_model returns
        threads: compute threads of this process, which is torch's own setting for all of it; 0 leaves it
        max_context: most tokens of a sequence; 0 or more than the model's limit means the model's limit

        Raises ModelError when the model cannot be loaded or the pool has no room.
        """
        if threads:
            torch.set_num_threads(threads)
        config = read_model_config(model_path)
        self._dtype = resolve_dtype(config, dtype, device)
        self._device = _device(device)
        torch_dtype = getattr(torch, self._dtype)
        self._model = load_model(model_path, config, torch_dtype, self._device)
        self._eos_token_ids = config.eos_token_ids
        self._windows = config.windows
        limit = min(max_context, config.max_context) if max_context else config.max_context
        self._shape = ModelShape(
            config.vocab_size, limit, config.layers, config.kv_heads, config.head_dim, DTYPES[self._dtype]
        )
        self._block_size = block_size
        self._pool = allocate_pool(self._shape, num_blocks, block_size, torch_dtype, self._device)

    @property
    def shape(self) -> ModelShape:
        """The model's shape; max_context is the limit that `run` enforces."""
        return self._shape

    @property
    def device(self) -> str:
        """`cpu`, or the CUDA device with its name."""
        if self._device.type == "cuda":
            return f"{self._device} {torch.cuda.get_device_name(self._device)}"
        return str(self._device)

    @property
    def dtype_name(self) -> str:
        """What `auto` came to: a key of DTYPES. What model_identity needs."""
        return self._dtype

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens by which the model ends its output."""
        return self._eos_token_ids

    @property
    def pool(self) -> torch.Tensor:
        """[blocks, layers, 2, kv_heads, block_size, head_dim], for moving blocks between workers."""
        return self._pool

    def run(self, chunks: ReadOnly[Chunk]) -> list[ChunkResult]:
        """Compute one step; see ModelRunner.

        Raises ValueError when a chunk breaks the contract (empty, a token outside the vocabulary, beyond
        max_context, blocks missing or outside the pool), before anything is written.
        """
        if not chunks:
            return []
        self._check(chunks)
        with torch.inference_mode():
            batch = self._batch(chunks)
            return read_results(self._model.forward(batch, self._pool), chunks)

    def _check(self, chunks: ReadOnly[Chunk]) -> None:
        for index, chunk in enumerate(chunks):
            end = chunk.start + len(chunk.token_ids)
            if chunk.start < 0 or not chunk.token_ids:
                raise ValueError(f"chunk {index}: {len(chunk.token_ids)} tokens at {chunk.start}")
            if end + len(chunk.drafts) > self._shape.max_context:
                raise ValueError(
                    f"chunk {index}: ends at {end + len(chunk.drafts)}, beyond max_context"
                    f" {self._shape.max_context}"
                )
            following = () if chunk.next_prompt_token is None else (chunk.next_prompt_token,)
            tokens = (*chunk.token_ids, *chunk.drafts, *following)
            if min(tokens) < 0 or max(tokens) >= self._shape.vocab_size:
                raise ValueError(
                    f"chunk {index}: a token is outside the vocabulary of {self._shape.vocab_size}"
                )
            if chunk.drafts and chunk.sampling is None:
                raise ValueError(f"chunk {index}: drafts can be verified only where a token is sampled")
            if chunk.sampling and counts_history(chunk.sampling) and len(chunk.history) != end:
                raise ValueError(
                    f"chunk {index}: penalties need {end} tokens of history, has {len(chunk.history)}"
                )

    def _batch(self, chunks: ReadOnly[Chunk]) -> ForwardBatch:
        """Lay the chunks, each with its drafts, end to end."""
        lengths = [len(chunk.token_ids) + len(chunk.drafts) for chunk in chunks]
        ends = [chunk.start + length for chunk, length in zip(chunks, lengths, strict=True)]
        tables = [chunk.block_table for chunk in chunks]
        attention = attention_metadata(self._pool, tables, lengths, ends, self._windows)
        positions = [torch.arange(chunk.start, end) for chunk, end in zip(chunks, ends, strict=True)]
        slots = [
            torch.tensor(table)[own // self._block_size] * self._block_size + own % self._block_size
            for table, own in zip(tables, positions, strict=True)
        ]
        firsts = accumulate(lengths[:-1], initial=0)
        rows = [
            first + offset
            for first, chunk in zip(firsts, chunks, strict=True)
            for offset in logit_offsets(chunk)
        ]
        tokens = torch.tensor(
            list(chain.from_iterable((*chunk.token_ids, *chunk.drafts) for chunk in chunks))
        )
        return ForwardBatch(
            token_ids=tokens.to(self._device),
            positions=torch.cat(positions).to(self._device),
            slot_mapping=torch.cat(slots).to(self._device),
            attention=attention,
            logit_rows=torch.tensor(rows, dtype=torch.int64).to(self._device),
        )


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device(name)
    if not name.startswith("cuda"):
        raise ModelError(f"device {name!r} is not supported; cpu and cuda are")
    if not torch.cuda.is_available():
        raise ModelError(f"device {name!r} was asked for, but torch {torch.__version__} sees no CUDA device")
    return torch.device(name if ":" in name else f"{name}:{torch.cuda.current_device()}")
