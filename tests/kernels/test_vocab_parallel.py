"""The ranks' shares together are the unsharded operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvhive.kernels.reference.operators import ReferenceOperators
from kvhive.kernels.vocab_parallel import vocab_parallel_argmax, vocab_parallel_embedding

SHARDS = [(0, 7), (7, 14), (14, 19)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_over_ranks_is_the_embedding(dtype):
    torch.manual_seed(0)
    weight, token_ids = torch.randn(19, 8).to(dtype), torch.arange(19).flip(0)
    shares = [vocab_parallel_embedding(token_ids, weight[start:stop], start) for start, stop in SHARDS]
    assert torch.equal(sum(shares[1:], shares[0]), F.embedding(token_ids, weight))


def test_what_is_not_a_number_stays_where_it_is():
    """A rank's share of another one's token is zero, even if the row that it looked up instead is NaN."""
    share = vocab_parallel_embedding(torch.tensor([5]), torch.full((3, 2), torch.nan), 0)
    assert torch.equal(share, torch.zeros(1, 2))


def test_the_ranks_winners_hold_the_winner():
    torch.manual_seed(0)
    logits = torch.randint(-3, 3, (40, 19)).float()
    parts = [ReferenceOperators().greedy(logits[:, start:stop]) for start, stop in SHARDS]
    largest = torch.stack([part[0] for part in parts])
    tokens = torch.stack([part[1] + start for part, (start, _) in zip(parts, SHARDS, strict=True)])
    assert torch.equal(vocab_parallel_argmax(largest, tokens), logits.argmax(dim=-1))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="shard: needs"):
        vocab_parallel_embedding(torch.tensor([0]), torch.zeros(0, 4), 0)
    with pytest.raises(ValueError, match="need one"):
        vocab_parallel_argmax(torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64))
