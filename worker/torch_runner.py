"""The model runner that computes: a model, its KV pool and the sampler, on one device."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ReadOnly
from itertools import accumulate

import torch

from kvhive.kernels.operators import operators_for
from kvhive.worker.decode_graphs import DecodeGraphs, graph_sizes, is_plain_decode
from kvhive.worker.decoder import DecoderModel
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.forward_batch import LanguageModel
from kvhive.worker.grammar_masks import GrammarMasks, Masks
from kvhive.worker.kv_cache import PoolSpec, allocate_pool
from kvhive.worker.model_runner import Chunk, ChunkResult, ModelShape
from kvhive.worker.pool_size import DeviceMemory, measured_blocks
from kvhive.worker.rank_group import RankGroup
from kvhive.worker.rank_steps import tell_step, told_steps
from kvhive.worker.sampler import counts_history, logit_offsets, read_results
from kvhive.worker.step_inputs import StepInputs
from kvhive.worker.transformers_config import TransformersConfig


class TorchModelRunner:
    """Implements ModelRunner. Owns the pool: nothing else writes to it, and it starts as zeros."""

    def __init__(
        self,
        model: LanguageModel,
        config: DecoderConfig | TransformersConfig,
        dtype: str,
        device: torch.device,
        pool: PoolSpec,
        max_context: int = 0,
        memory: DeviceMemory | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """Allocate the pool for a model that is on the device.

        dtype: what the model was made with, a key of DTYPES
        pool: without a number of blocks, it has those that `memory` says that the CUDA device has room for
        max_context: most tokens of a sequence; 0 or more than the model's limit means the model's limit
        memory: how a CUDA device is used; without it there are no CUDA graphs
        ranks: those that share the model, whose part of it `config` is. All make such a runner at once and
            have equally many blocks; rank 0 launches steps, the others `follow`

        Raises ModelError when the pool has no room, or a format that the device does not know.
        """
        self._model, self._dtype, self._device, self._ranks = model, dtype, device, ranks
        pool_dtype = pool.torch_dtype(getattr(torch, dtype), device)
        self._eos_token_ids = config.eos_token_ids
        self._windows = config.windows
        limit = min(max_context, config.max_context) if max_context else config.max_context
        self._shape = ModelShape(
            config.vocab_size, limit, config.layers, config.kv_heads, config.head_dim, pool_dtype.itemsize
        )
        cuda = memory if self._device.type == "cuda" else None
        if ranks is not None:
            ranks.arrive()  # having loaded, which takes some longer: NCCL would not wait
        self._num_blocks = pool.blocks or self._room(cuda, pool_dtype, pool.block_size)
        if ranks is not None:
            self._num_blocks = ranks.smallest(self._num_blocks)
        # A graph pads its batch; what the padding writes goes to one block that nobody is given.
        blocks = self._num_blocks + (cuda is not None)
        self._pool = allocate_pool(self._shape, blocks, pool.block_size, pool_dtype, self._device)
        self._inputs = StepInputs(self._pool, self._windows)
        self._graphs = self._capture(cuda)
        self._masks = GrammarMasks()

    @property
    def shape(self) -> ModelShape:
        """The model's shape; max_context is the limit that `run` enforces."""
        return self._shape

    @property
    def device(self) -> str:
        """`cpu`, or the CUDA device with its name; and how many ranks have one like it."""
        name = str(self._device)
        if self._device.type == "cuda":
            name += f" {torch.cuda.get_device_name(self._device)}"
        return name if self._ranks is None else f"{name}, {self._ranks.shard.ranks} ranks"

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
        """[blocks, layers, 2, kv_heads, block_size, head_dim], for moving blocks between workers.

        Of several ranks each has only its own KV heads' part of every block.
        """
        return self._pool[: self._num_blocks]

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._num_blocks

    @property
    def overlaps(self) -> bool:
        """Whether the device computes by itself: CUDA does."""
        return str(self._device.type) == "cuda"

    def launch(self, chunks: ReadOnly[Chunk]) -> Callable[[], list[ChunkResult]]:
        """Begin one step; see ModelRunner.

        Raises ValueError when a chunk breaks the contract (empty, a token outside the vocabulary, beyond
        max_context, blocks missing or outside the pool), before anything is written.
        """
        if not chunks:
            return list
        self._check(chunks)
        masks = self._masks.begin(chunks)
        with torch.inference_mode():
            logits = self._logits(chunks)
        return lambda: self._results(logits, chunks, masks())

    def run(self, chunks: ReadOnly[Chunk]) -> list[ChunkResult]:
        """Compute one step, with launch's errors."""
        return self.launch(chunks)()

    def follow(self) -> None:
        """On ranks but the first: compute what rank 0 tells until it ends.

        Raises Unavailable when rank 0 is lost.
        """
        assert self._ranks is not None
        with torch.inference_mode():
            for batch in told_steps(self._ranks, self._inputs):
                self._model.forward(batch, self._pool)

    def _results(self, logits: torch.Tensor, chunks: ReadOnly[Chunk], masks: Masks) -> list[ChunkResult]:
        if self.overlaps and not logits.shape[0]:
            # Nothing is read of such a step, so nothing else would wait for its end.
            torch.cuda.current_stream(self._device).synchronize()
        with torch.inference_mode():
            return read_results(logits, chunks, masks)

    def _logits(self, chunks: ReadOnly[Chunk]) -> torch.Tensor:
        if self._graphs is not None and all(map(is_plain_decode, chunks)):
            logits = self._graphs.logits(chunks)
            if logits is not None:
                return logits
        batch = self._inputs.lay_out(chunks, _logit_rows(chunks))
        if self._ranks is None:
            return self._model.forward(batch, self._pool)
        with self._ranks.turn:
            tell_step(self._ranks, self._inputs, batch)
            return self._model.forward(batch, self._pool)

    def _room(self, memory: DeviceMemory | None, dtype: torch.dtype, block_size: int) -> int:
        if memory is None:
            raise ValueError(
                "num_blocks: only a CUDA device's memory can be measured; needs at least 1, is 0"
            )
        with torch.inference_mode():
            return measured_blocks(
                self._model, self._shape, self._windows, dtype, self._device, block_size, memory
            )

    def _capture(self, memory: DeviceMemory | None) -> DecodeGraphs | None:
        if memory is None or not memory.graphs or not isinstance(self._model, DecoderModel):
            return None  # what transformers' layers do, a graph may not be able to record
        if self._ranks is not None:
            return None  # the other ranks would have to be told which graph
        if not operators_for(self._pool).records_attention(self._pool[:, 0]):
            return None  # it would record the lengths of the batch that it was captured with
        sizes = graph_sizes(memory.max_running)
        with torch.inference_mode():
            return DecodeGraphs(self._model, self._pool, self._windows, sizes, self._shape.max_context)

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


def _logit_rows(chunks: ReadOnly[Chunk]) -> list[int]:
    """Return the step's tokens, counted over all chunks and drafts, whose successor is asked for."""
    firsts = accumulate((len(chunk.token_ids) + len(chunk.drafts) for chunk in chunks), initial=0)
    return [
        first + offset
        for first, chunk in zip(firsts, chunks, strict=False)
        for offset in logit_offsets(chunk)
    ]
