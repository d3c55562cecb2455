"""A decoder's layers in one call give the bits that they give one operator at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny

from kvhive.kernels.attention_metadata import attention_metadata
from kvhive.kernels.operators import operators_on
from kvhive.worker.decoder import DecoderModel
from kvhive.worker.forward_batch import ForwardBatch
from kvhive.worker.model_config import read_model_config
from kvhive.worker.model_loader import load_model

FAMILIES = {
    "llama": ("Llama", {"head_dim": 16}),
    "llama, biases": ("Llama", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "mistral, sliding": ("Mistral", {"head_dim": 16, "sliding_window": 5}),
    "qwen3, q and k norms": ("Qwen3", {"head_dim": 24}),
    "gemma2, soft caps, two windows": ("Gemma2", {"head_dim": 16, "sliding_window": 4}),
    "gemma3, two ropes, wide norms": ("Gemma3Text", {"head_dim": 16, "sliding_window": 4}),
}
BLOCK = 4


@pytest.fixture(autouse=True)
def _needs_native_kernels():
    if operators_on("cpu").name != "native":
        pytest.skip("no C++ compiler here")


def batch(pool: torch.Tensor, model: DecoderModel, queries: list[int], contexts: list[int]) -> ForwardBatch:
    """Sequences with blocks in reverse order; ids and positions follow from where they are."""
    tables, free = [], list(range(pool.shape[0]))
    for context in contexts:
        tables.append([free.pop() for _ in range(-(-context // BLOCK))])
    positions = [p for q, c in zip(queries, contexts, strict=True) for p in range(c - q, c)]
    owners = [table for table, q in zip(tables, queries, strict=True) for _ in range(q)]
    slots = [table[p // BLOCK] * BLOCK + p % BLOCK for table, p in zip(owners, positions, strict=True)]
    metadata = attention_metadata(pool, tables, queries, contexts, model.config.windows)
    ids = torch.tensor([(7 * p + 3) % 50 for p in positions])
    return ForwardBatch(ids, torch.tensor(positions), torch.tensor(slots), metadata, torch.arange(len(ids)))


def loaded(path, dtype=torch.float32) -> DecoderModel:
    model = load_model(path, read_model_config(path), dtype, torch.device("cpu"))
    assert isinstance(model, DecoderModel)
    return model


def filled_pool(model: DecoderModel, dtype=torch.float32) -> torch.Tensor:
    config = model.config
    return torch.randn(24, config.layers, 2, config.kv_heads, BLOCK, config.head_dim).to(dtype)


LENGTHS = [([1, 1, 1], [9, 1, 30]), ([60], [61]), ([1], [13]), ([1, 6, 2], [17, 6, 20])]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits(tmp_path, monkeypatch, family, dtype):
    """Long and short steps of one model: what one leaves in the memory between layers harms no other."""
    # In bfloat16 oneDNN would be asked first where the CPU has instructions for it.
    monkeypatch.setattr("kvhive.worker.linear._onednn_packs", lambda dtype: False)
    torch.manual_seed(0)
    name, changes = family
    tiny(name, **changes).save_pretrained(tmp_path)
    model = loaded(tmp_path, dtype)
    fused = model._fused
    assert fused is not None
    for lengths in LENGTHS:
        pool = filled_pool(model, dtype)
        pools = [pool.clone(), pool.clone()]
        model._fused = fused
        together = model.forward(batch(pools[0], model, *lengths), pools[0])
        model._fused = None
        one_by_one = model.forward(batch(pools[1], model, *lengths), pools[1])
        assert torch.equal(together, one_by_one)
        assert torch.equal(*pools)
        assert not torch.equal(pools[0], pool)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("rows", [[], [59], [3, 30, 64], [62, 63, 64], [30, 3, 64]], ids=str)
def test_the_rows_that_are_asked_for_have_the_same_bits(tmp_path, family, rows):
    """The last layer computes few rows alone, in their order; the KV of all tokens is written as ever."""
    torch.manual_seed(0)
    name, changes = family
    tiny(name, **changes).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    pool = filled_pool(model)
    pools = [pool.clone(), pool.clone()]
    asked, everything = (batch(one, model, [60, 1, 4], [61, 9, 6]) for one in pools)
    asked = replace(asked, logit_rows=torch.tensor(rows, dtype=torch.int64))
    few = model.forward(asked, pools[0])
    assert torch.equal(few, model.forward(everything, pools[1])[rows])
    assert torch.equal(*pools)


def test_of_other_rows_the_last_layer_computes_nothing(tmp_path):
    """It would show in `hidden`, which layers overwrite."""
    tiny("Llama", head_dim=16, num_hidden_layers=1).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    pool = filled_pool(model)
    step = batch(pool, model, [60], [61])
    hidden = torch.randn(60, model.config.hidden_size)
    before, angles = hidden.clone(), model._angles(step.positions)
    where = pool, step.attention, step.slot_mapping
    model._fused(hidden, hidden.clone(), angles, *where, torch.tensor([59]))
    assert not torch.equal(hidden[0], before[0])
    assert torch.equal(hidden[1:], before[1:])


def test_a_slot_outside_the_pool_is_an_error(tmp_path):
    tiny("Llama", head_dim=16).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    pool = filled_pool(model)
    step = batch(pool, model, [1], [5])
    step.slot_mapping.fill_(24 * BLOCK)
    with pytest.raises(IndexError, match="outside the pool of 96"):
        model.forward(step, pool)
