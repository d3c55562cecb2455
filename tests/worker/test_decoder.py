"""Logits equal transformers' for every variant of Llama we claim, from safetensors and from GGUF alike."""

from __future__ import annotations

import json
import random
import shutil

import gguf
import pytest
from tiny_models import Paged, assert_all_ways_equal_transformers, own_logits, tiny, write_gguf

from kvhive.proto.errors import ModelError
from kvhive.worker.model_config import read_model_config
from kvhive.worker.runner_loader import load_runner
from kvhive.worker.tensor_manifest import safetensors_files

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "tied, grouped queries": {"tie_word_embeddings": True},
    "untied, all heads alike": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "one KV head, odd head_dim": {"num_key_value_heads": 1, "head_dim": 24},
    "attention and mlp bias": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_safetensors_logits_equal_transformers(tmp_path, changes):
    model = tiny(**changes)
    model.save_pretrained(tmp_path)
    assert_all_ways_equal_transformers(tmp_path, model)


def test_shards_are_read_through_their_index(tmp_path):
    model = tiny(tie_word_embeddings=False)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(safetensors_files(tmp_path)) > 2
    assert_all_ways_equal_transformers(tmp_path, model)


def test_older_config_keys_mean_the_same(tmp_path):
    """Before transformers 5: rope_theta and rope_scaling side by side, torch_dtype."""
    model = tiny(rope_parameters=LLAMA3)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    scaling = dict(raw.pop("rope_parameters"))
    raw |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    raw["torch_dtype"] = raw.pop("dtype")
    path.write_text(json.dumps(raw))
    assert_all_ways_equal_transformers(tmp_path, model)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "linear rope"])
def test_gguf_and_safetensors_of_one_model_agree(tmp_path, variant):
    """The same logits and the same end tokens from both files of one model."""
    model = tiny(**VARIANTS[variant])
    model.save_pretrained(tmp_path / "hf")
    path = write_gguf(tmp_path / "model.gguf", model)
    assert_all_ways_equal_transformers(path, model)
    one, two = read_model_config(path), read_model_config(tmp_path / "hf")
    assert one.eos_token_ids == two.eos_token_ids == {2, 7}
    assert (one.vocab_size, one.max_context, one.heads) == (two.vocab_size, two.max_context, two.heads)


def test_a_vocabulary_that_is_no_round_number_keeps_its_last_token(tmp_path):
    """As far as one device goes: no padding of the vocabulary is ever sampled or cut off."""
    model = tiny(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    logits = Paged(tmp_path).logits([100, 3, 100, 0, 99], cuts=(2,))
    assert logits.shape == (5, 101)


def test_quantized_gguf_is_dequantized(tmp_path):
    """Q8_0 of random weights is within its half-step of the original's logits."""
    model = tiny(hidden_size=64, intermediate_size=96)
    path = write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType.Q8_0)
    expected = own_logits(model, [5, 9, 77, 3])
    difference = (Paged(path).logits([5, 9, 77, 3], cuts=(2,)) - expected).abs().max()
    assert difference < 0.05 * expected.abs().max()


BAD_CONFIGS = {
    "architecture": ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
    "no architecture": ({"architectures": [3]}, "architectures must be a list of names"),
    "sliding window": ({"sliding_window": 64}, "sliding_window"),
    "activation": ({"hidden_act": "gelu"}, "gelu"),
    "rope": ({"rope_parameters": {"rope_type": "axial", "factor": 2.0}}, "'axial'"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantized"),
    "missing size": ({"hidden_size": None}, "hidden_size is missing"),
    "text for a number": ({"num_hidden_layers": "3"}, "num_hidden_layers must be an integer"),
    "heads": ({"num_key_value_heads": 3}, "no multiple of 3"),
    "no layers": ({"num_hidden_layers": 0}, "layers must be 1 to"),
    "absurd size": ({"intermediate_size": 10**12}, "intermediate_size must be 1 to"),
    "absurd depth": ({"num_hidden_layers": 10**6}, "layers must be 1 to 4096"),
    "zero theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope theta"),
    "llama3 without a gap": ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "rope scaling factors"),
    "eos": ({"eos_token_id": "end"}, "eos_token_id"),
}


@pytest.mark.parametrize(("change", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_a_config_we_cannot_serve_is_a_model_error_that_names_why(tmp_path, change, message):
    tiny().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


def test_weights_that_do_not_fit_name_the_file_and_the_tensor(tmp_path):
    model = tiny()
    for change, message in [
        ({"num_hidden_layers": 4}, r"model.layers.3.*is missing, and 8 more"),
        ({"num_hidden_layers": 2}, r"model.layers.2.*has no place"),
        ({"intermediate_size": 95}, r"mlp.*needs shape .*95"),
        ({"attention_bias": True}, r"bias: is missing"),
    ]:
        model.save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(ModelError, match=message) as caught:
            load_runner(tmp_path, num_blocks=2)
        assert str(tmp_path) in str(caught.value)


def test_damaged_safetensors_name_the_file(tmp_path):
    whole = tmp_path / "whole"
    tiny().save_pretrained(whole)
    data = (whole / "model.safetensors").read_bytes()
    damages = [b"", data[:5], data[:200], data[:-1], data[:2000] + b"}" + data[2001:], b"\xff" * 4000]
    for index, damage in enumerate(damages):
        copy = tmp_path / f"copy{index}"
        shutil.copytree(whole, copy)
        (copy / "model.safetensors").write_bytes(damage)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            load_runner(copy, num_blocks=2)


def test_missing_shards_escaping_shards_and_pickles_are_refused(tmp_path):
    tiny().save_pretrained(tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    first = safetensors_files(tmp_path)[0]
    moved = first.rename(tmp_path.parent / "elsewhere.safetensors")
    with pytest.raises(ModelError, match=f"{first.name}.*missing"):
        safetensors_files(tmp_path)
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.norm.weight"] = f"../{moved.name}"
    index.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="not the name of a safetensors file"):
        safetensors_files(tmp_path)
    index.write_text("[]")
    with pytest.raises(ModelError, match="cannot be read as a safetensors index"):
        safetensors_files(tmp_path)
    index.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"canary")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        safetensors_files(tmp_path)


def test_damaged_gguf_names_the_file(tmp_path, demo_gguf):
    good = write_gguf(tmp_path / "good.gguf", tiny())
    data = good.read_bytes()
    cuts = [0, 3, 10, 30, 500, 5000, len(data) // 2, len(data) - 40]
    path = tmp_path / "bad.gguf"
    for cut in cuts:
        path.write_bytes(data[:cut])
        with pytest.raises(ModelError, match=r"bad\.gguf"):
            load_runner(path, num_blocks=2)
    rng = random.Random(0)
    for _ in range(150):  # a flipped byte of the header is an error of ours, or harmless; never another's
        damaged = bytearray(data)
        damaged[rng.randrange(4, 4000)] = rng.choice([0, 1, 0x7F, 0xFF])
        path.write_bytes(damaged)
        try:
            load_runner(path, num_blocks=2)
        except ModelError as error:
            assert "bad.gguf" in str(error)
