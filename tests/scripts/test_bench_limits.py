"""The limits of a CPU, by hand for a model of one small layer."""

from __future__ import annotations

import pytest

from kvhive.scripts.bench_limits import CpuRates, ItemSizes, bound_of
from kvhive.scripts.bench_workloads import Ask, Workload
from kvhive.worker.decoder_config import DecoderConfig, Rope

CONFIG = DecoderConfig(
    vocab_size=10, hidden_size=8, intermediate_size=6, layers=1, heads=2, kv_heads=1, head_dim=4,
    max_context=100, rms_norm_eps=1e-5, rope=Rope(10000.0), tie_embeddings=True,
    attention_bias=False, output_bias=False, mlp_bias=False,
    eos_token_ids=frozenset(), checkpoint_dtype="float32", attention_scale=0.5,
)  # fmt: skip
LAYER = (8 + 8) * 8 + 8 * 8 + 12 * 8 + 8 * 6
"""Elements of Q, K, V; output; gate and up; down."""


def test_prompts_are_computed_once_where_they_are_shared_and_steps_take_the_longer_of_two() -> None:
    asks = (Ask((1, 2, 3), 3), Ask((1, 2, 4), 3))
    fast_memory = CpuRates(read_bytes_s=1e30, multiply_flop_s=1.0)
    bound = bound_of(Workload("x", "", 2, asks), CONFIG, ItemSizes(4, 4), fast_memory)
    # Tokens 1, 2 once, 3 and 4 once each: pairs 1 + 2, then 3 twice.
    assert bound.prefill_s == pytest.approx(2 * LAYER * 4 + 4 * 8 * (1 + 2 + 3 + 3))
    steps = [2 * (LAYER + 80) * 2 + 4 * 8 * (2 * context) for context in (3, 4)]
    assert bound.decode_s == pytest.approx(sum(steps))
    assert bound.output_tok_s == pytest.approx(6 / (bound.prefill_s + bound.decode_s))
    assert bound.total_tok_s == pytest.approx(12 / (bound.prefill_s + bound.decode_s))
    fast_processor = CpuRates(read_bytes_s=1.0, multiply_flop_s=1e30)
    bound = bound_of(Workload("x", "", 2, asks), CONFIG, ItemSizes(2, 4), fast_processor)
    assert bound.decode_s == pytest.approx(
        sum(2 * (LAYER + 80) + 4 * 2 * 4 * 2 * context for context in (3, 4))
    )
