"""K and V land in their slots and nowhere else."""

from __future__ import annotations

import pytest
import torch

from kvhive.kernels.reshape_and_cache import reshape_and_cache


def test_writes_its_slots_and_nothing_else():
    torch.manual_seed(0)
    pool = torch.full((4, 3, 2, 2, 5, 8), 7.0)
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([19, 0, 7])
    reshape_and_cache(key, value, pool[:, 1], slots)
    expected = torch.full_like(pool, 7.0)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 5, 1, 0, :, slot % 5] = key[token]
        expected[slot // 5, 1, 1, :, slot % 5] = value[token]
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(3, 1, 8)}, "key, value: need"),
        ({"value": torch.zeros(2, 2, 8)}, "key, value: need"),
        ({"key": torch.zeros(3, 2, 8, dtype=torch.bfloat16)}, "need the pool's torch.float32"),
        ({"slots": torch.tensor([1, 2, 3], dtype=torch.int32)}, "needs int64"),
        ({"pool": torch.zeros(4, 2, 5, 8)}, "pool_layer: needs"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {
        "key": torch.zeros(3, 2, 8),
        "value": torch.zeros(3, 2, 8),
        "pool": torch.zeros(4, 2, 2, 5, 8),
        "slots": torch.tensor([1, 2, 3]),
    } | change
    with pytest.raises(ValueError, match=message):
        reshape_and_cache(*given.values())
