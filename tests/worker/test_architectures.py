"""Logits equal transformers' for every architecture of the native decoder, from safetensors and from GGUF.

Whole prompts, chunks, decodes and cached prefixes alike.
"""

from __future__ import annotations

import json

import gguf
import numpy
import pytest
import torch
from tiny_models import (
    Paged,
    assert_all_ways_equal_transformers,
    own_logits,
    quantise,
    text,
    tiny,
    write_gguf,
)
from tiny_variants import ONLY_SAFETENSORS, VARIANTS, YARN

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder import DecoderModel
from kvhive.worker.model_config import read_model_config
from kvhive.worker.model_runner import Chunk
from kvhive.worker.runner_loader import load_runner
from kvhive.worker.sequence import SamplingParams

BOTH = VARIANTS | ONLY_SAFETENSORS


@pytest.mark.parametrize("variant", BOTH)
def test_safetensors_equal_transformers(tmp_path, variant):
    family, changes = BOTH[variant]
    model = tiny(family, **changes)
    model.save_pretrained(tmp_path, max_shard_size="90KB")
    assert_all_ways_equal_transformers(tmp_path, model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gguf_equals_transformers_and_the_safetensors_configuration(tmp_path, variant):
    family, changes = VARIANTS[variant]
    model = tiny(family, **changes)
    model.save_pretrained(tmp_path / "hf")
    path = write_gguf(tmp_path / "model.gguf", model)
    assert_all_ways_equal_transformers(path, model)
    one, two = read_model_config(path), read_model_config(tmp_path / "hf")
    for name in ("eos_token_ids", "vocab_size", "max_context", "window", "sliding_layers", "windows"):
        assert getattr(one, name) == getattr(two, name), name


def test_older_gemma3_keys_mean_the_same(tmp_path):
    """As Gemma 3 was published: a pattern, two bases, one scaling for the layers that do not slide."""
    family, changes = VARIANTS["gemma3, two ropes"]
    model = tiny(family, **changes)
    model.save_pretrained(tmp_path)
    new = read_model_config(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["rope_parameters"], raw["layer_types"], raw["tie_word_embeddings"]
    raw |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    raw["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    path.write_text(json.dumps(raw))
    assert read_model_config(tmp_path) == new


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")


def blocks(kind, shape, rng):
    """Random whole blocks of a type that nothing here can quantise to, with scales of a sensible size."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    count = shape[1] // elements
    raw = rng.integers(0, 256, (shape[0], count, nbytes), dtype=numpy.uint8)
    halves = {"Q4_K": (0, 2), "Q6_K": (nbytes - 2, nbytes)}[kind.name]
    scale = numpy.float16(rng.uniform(2e-4, 6e-4, (shape[0], count, 1))).view(numpy.uint8)
    raw[..., halves[0] : halves[1]] = scale
    if kind.name == "Q4_K":
        raw[..., 2:4] = scale  # the minimums' own
    return raw.reshape(shape[0], -1)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_quantisation_is_computed_as_it_is_dequantised(tmp_path, name, family):
    """The oracle is a model of transformers' whose weights are what gguf's own code makes of the blocks.

    Every matrix is quantised: embeddings and output too, and Llama's heads with their rows rearranged.
    """
    kind = gguf.GGMLQuantizationType[name]
    model = tiny(family, hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=2)
    rng = numpy.random.default_rng(0)

    def pack(values):
        made_up = name in ("Q4_K", "Q6_K")
        return blocks(kind, values.shape, rng) if made_up else gguf.quants.quantize(values, kind)

    packed = quantise(model, kind, pack)
    assert len(packed) == 2 + 2 * 7
    path = write_gguf(tmp_path / "model.gguf", model, packed=packed)
    tokens = text(30)
    torch.testing.assert_close(
        Paged(path).logits(tokens, cuts=(13,)), own_logits(model, tokens), rtol=0, atol=5e-4
    )


def test_the_runner_generates_what_transformers_does_past_the_window(tmp_path):
    """Through the runner's own batching: a window is not forgotten on the way."""
    model = tiny("Mistral", sliding_window=7)
    model.save_pretrained(tmp_path)
    runner = load_runner(tmp_path, num_blocks=8, block_size=8)
    tokens, greedy = text(33), SamplingParams(max_tokens=8)
    start = 0
    while len(tokens) < 41:
        chunk = Chunk(tokens[start:], start, list(range(8)), greedy, tokens, 33)
        start = len(tokens)
        tokens = [*tokens, *runner.run([chunk])[0].tokens]
    expected = own_logits(model, tokens).argmax(-1).tolist()
    assert tokens[33:] == expected[32:-1]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text"])
def test_the_native_decoder_serves_its_six_families(tmp_path, family):
    tiny(family, head_dim=16).save_pretrained(tmp_path)
    assert isinstance(Paged(tmp_path).model, DecoderModel)


BAD = {
    "a layer type": ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["conv"] * 3}),
    "no window": ("Gemma2", {"sliding_window": 0}),
    "both ways": ("Gemma3Text", {"use_bidirectional_attention": True}),
    "scale": ("Gemma2", {"query_pre_attn_scalar": 0}),
    "soft cap": ("Gemma2", {"attn_logit_softcapping": -1.0}),
    "activation": ("Gemma2", {"hidden_activation": "relu"}),
    "rope": ("Qwen2", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}),
    "yarn": ("Qwen2", {"rope_parameters": YARN | {"factor": 0}}),
    "yarn's base": ("Qwen2", {"rope_parameters": YARN | {"rope_theta": 1.0}}),
}
REASONS = {
    "a layer type": "layer_types",
    "no window": "window must be 1 to",
    "both ways": "use_bidirectional_attention",
    "scale": "attention scale",
    "soft cap": "soft caps must be above 0",
    "activation": "'relu' is not supported",
    "rope": "'longrope' is not supported",
    "yarn": "rope scaling factors",
    "yarn's base": "rope theta",
}


@pytest.mark.parametrize("case", BAD)
def test_what_the_decoder_would_compute_wrongly_is_refused_by_name(tmp_path, case):
    family, change = BAD[case]
    tiny(family, head_dim=16).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=REASONS[case]):
        read_model_config(tmp_path)


def test_a_gguf_of_another_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("token_embd.weight", numpy.zeros((4, 4), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba' is not supported"):
        read_model_config(tmp_path / "model.gguf")
