"""Speculation with the demo model: the same tokens, and as many accepted as there should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from speculation_rig import Bench, Generation

from kvhive.proto.config import SpeculationConfig
from kvhive.proto.errors import ModelError
from kvhive.worker.draft_model import DraftModel
from kvhive.worker.gguf_file import read_gguf
from kvhive.worker.ngram_drafter import NgramDrafter
from kvhive.worker.options import WorkerOptions
from kvhive.worker.runner_loader import load_runner
from kvhive.worker.sequence import SamplingParams
from kvhive.worker.speculation import make_drafter
from kvhive.worker.speculative_runner import SpeculativeRunner
from kvhive.worker.vocabulary import check_same_vocabulary, token_names

BLOCKS = 128
BLOCK_SIZE = 16
TOKENS_KEY = "tokenizer.ggml.tokens"
TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "rope_theta": 10000.0, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
PROMPT = list(range(1000, 1040))
CODE = [504, 2365, 282, 1297, 314, 338, 7, 28, 216, 33, 30] * 6
"""Tokens that repeat, as code does."""


@pytest.fixture(scope="module")
def target(demo_gguf):
    return load_runner(demo_gguf, num_blocks=BLOCKS, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def tiny(demo_gguf, tmp_path_factory) -> Path:
    """A random model of 800,000 weights with the demo model's vocabulary."""
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(TINY))
    tokens = read_gguf(demo_gguf, {TOKENS_KEY}).strings[TOKENS_KEY]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    torch.manual_seed(0)
    layer, tensors = "model.layers.0.", {"model.embed_tokens.weight": torch.randn(49152, 16)}
    for name, shape in (
        ("self_attn.q_proj", (16, 16)), ("self_attn.k_proj", (8, 16)), ("self_attn.v_proj", (8, 16)),
        ("self_attn.o_proj", (16, 16)), ("mlp.gate_proj", (32, 16)), ("mlp.up_proj", (32, 16)),
        ("mlp.down_proj", (16, 32)),
    ):  # fmt: skip
        tensors[f"{layer}{name}.weight"] = torch.randn(*shape)
    for name in (f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm"):
        tensors[f"{name}.weight"] = torch.ones(16)
    save_file(tensors, directory / "model.safetensors")
    return directory


def options(demo_gguf, mode, draft_model=""):
    return WorkerOptions(
        "w1", "c", str(demo_gguf), "demo", "", "", block_size=BLOCK_SIZE, pool_tokens=BLOCKS * BLOCK_SIZE,
        speculation=SpeculationConfig(mode, draft_model=str(draft_model)),
    )  # fmt: skip


def generations(prompt, temperature, count=2, max_tokens=14):
    sampling = [
        SamplingParams(max_tokens, temperature, top_p=0.95 if temperature else 1.0, seed=11, choice=choice)
        for choice in range(count)
    ]
    return [Generation(list(prompt), params) for params in sampling]


def speculate(target, drafter, wanted, max_drafts=4):
    bench = Bench(SpeculativeRunner(target, drafter, lambda: 0.0), max_drafts, BLOCK_SIZE, chunk=37)
    return bench, bench.run(wanted)


def plain(target, wanted):
    return Bench(target, 0, BLOCK_SIZE, chunk=37).run(wanted)


@pytest.fixture(scope="module")
def plain_outputs(target):
    """Temperature -> what comes without speculation."""
    return {temperature: plain(target, generations(PROMPT, temperature)) for temperature in (0.0, 1.0)}


@pytest.fixture(scope="module")
def self_drafting(demo_gguf, target):
    """The demo model as its own draft model, in a pool of its own."""
    drafter = make_drafter(options(demo_gguf, "draft", demo_gguf), target.shape, BLOCKS)
    assert isinstance(drafter, DraftModel)
    return drafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_nearly_always_right(
    target, self_drafting, plain_outputs, temperature
) -> None:
    """At temperature 1 too, since both draw with the same noise. Only rounding may differ."""
    bench, got = speculate(target, self_drafting, generations(PROMPT, temperature))
    assert got == plain_outputs[temperature]
    assert bench.accepted >= 0.9 * bench.drafted > 0


def test_its_acceptance_does_not_drift_over_turns(target, self_drafting) -> None:
    """Ten turns on the cached blocks of the last, drafts ending anywhere in a block."""
    bench = Bench(SpeculativeRunner(target, self_drafting, lambda: 0.0), 4, BLOCK_SIZE, chunk=64)
    (turn,) = generations(PROMPT, 0.0, count=1, max_tokens=6)
    shares = []
    for number in range(10):
        before = (bench.drafted, bench.accepted)
        bench.run([turn])
        shares.append((bench.accepted - before[1]) / (bench.drafted - before[0]))
        turn = turn.follow_up([2000 + number, 2001], 6, BLOCK_SIZE)
    assert sum(shares[:5]) >= 4.5 and sum(shares[5:]) >= 4.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_random_draft_model_changes_nothing_but_the_time(
    demo_gguf, target, tiny, plain_outputs, temperature
) -> None:
    drafter = make_drafter(options(demo_gguf, "draft", tiny), target.shape, BLOCKS)
    bench, got = speculate(target, drafter, generations(PROMPT, temperature))
    assert got == plain_outputs[temperature]
    assert bench.accepted <= 0.1 * bench.drafted


def test_ngrams_are_right_where_text_repeats(demo_gguf, target) -> None:
    """Fewer steps, the same tokens."""
    drafter = make_drafter(options(demo_gguf, "ngram"), target.shape, BLOCKS)
    assert isinstance(drafter, NgramDrafter)
    alone, speculated = generations(CODE, 0.0, 1, 24), generations(CODE, 0.0, 1, 24)
    wanted = plain(target, alone)
    bench, got = speculate(target, drafter, speculated)
    assert got == wanted
    assert bench.accepted > 0.5 * bench.drafted > 0
    assert speculated[0].steps < 0.6 * alone[0].steps


def test_off_means_no_drafter(demo_gguf, target) -> None:
    assert make_drafter(options(demo_gguf, "off"), target.shape, BLOCKS) is None


def test_the_vocabulary_is_read_from_both_kinds_of_files(demo_gguf, tiny) -> None:
    assert token_names(demo_gguf) == token_names(tiny)
    assert len(token_names(tiny)) == 49152
    check_same_vocabulary(demo_gguf, tiny)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"model": {"vocab": {"a": 0, "b": 1}}}, "token 0 is 'a' in one vocabulary"),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}, "token 0 is 'a' in one vocabulary"),
        ({"model": {}, "added_tokens": []}, "has no vocabulary to compare"),
        ({"model": {"vocab": {}}}, "has no vocabulary to compare"),
        (None, "has no vocabulary to compare"),
    ],
)
def test_another_vocabulary_or_none_is_refused(demo_gguf, target, tmp_path, tokenizer, message) -> None:
    """Before any weights are loaded."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=message):
        make_drafter(options(demo_gguf, "draft", tmp_path), target.shape, BLOCKS)


def test_a_draft_model_that_is_not_there_is_refused(demo_gguf, target, tmp_path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        make_drafter(options(demo_gguf, "draft", tmp_path / "none"), target.shape, BLOCKS)
