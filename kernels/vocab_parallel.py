"""Embedding and greedy choice where each rank holds a part of the vocabulary.

Each function computes one rank's share; what the ranks must exchange is said where it is needed. Plain torch:
one look-up and one comparison per token, which no kernel would make faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def vocab_parallel_embedding(token_ids: torch.Tensor, shard: torch.Tensor, first: int) -> torch.Tensor:
    """Return the rows of this rank's tokens, zeros for others': the sum over ranks is the embedding.

    token_ids:  [T] int64, of the whole vocabulary
    shard:      [own tokens, hidden]: rows first .. first + own tokens - 1 of the embedding

    Returns [T, hidden] in the shard's dtype. The sum is exact: all of its terms but one are zeros.
    Raises ValueError when the shard is empty or no matrix, or `first` is negative.
    """
    if shard.dim() != 2 or not shard.shape[0] or first < 0:
        raise ValueError(
            f"shard: needs [own tokens, hidden] from row 0 or later, is {shard.shape} at {first}"
        )
    local = token_ids - first
    foreign = (local < 0) | (local >= shard.shape[0])
    rows = F.embedding(local.masked_fill(foreign, 0), shard)
    return rows.masked_fill_(foreign[:, None], 0)


def vocab_parallel_argmax(largest: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return each row's winner among the ranks' winners: [rows] int64, ties to the lowest token id.

    largest:    [ranks, rows], each rank's largest score (Operators.greedy), in the order of their shards
    token_ids:  [ranks, rows] int64, its token in the whole vocabulary: the index in the shard plus `first`

    With Gumbel noise, which is a function of the token's id in the whole vocabulary, added to the scores, the
    winner is a draw. Raises ValueError when shapes do not fit.
    """
    if largest.dim() != 2 or largest.shape != token_ids.shape or not largest.shape[0]:
        raise ValueError(
            f"largest, token_ids: need one [ranks, rows], are {largest.shape} and {token_ids.shape}"
        )
    # Of equal ones argmax takes the first, and the ranks' shards ascend.
    return token_ids.gather(0, largest.argmax(dim=0, keepdim=True))[0]
