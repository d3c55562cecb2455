"""The seam between the runner and a model: the tokens of one step in, logits out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvhive.kernels.attention_metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one step, all sequences' chunks end to end, on the model's device."""

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64, each token's index in its own sequence."""
    slot_mapping: torch.Tensor
    """[T] int64, where each token's KV goes: block_id * block_size + offset."""
    attention: AttentionMetadata
    logit_rows: torch.Tensor
    """[S] int64, the tokens whose successor is asked for."""


class LanguageModel(Protocol):
    """What the runner asks of a model, whoever wrote its layers."""

    def forward(self, batch: ForwardBatch, pool: torch.Tensor) -> torch.Tensor:
        """Write the KV of all tokens into the pool and return the logits of the asked rows.

        pool: [blocks, layers, 2, kv_heads, block_size, head_dim]
        Returns [S, vocab_size]. One call at a time.
        """
        ...
