"""Models that transformers computes over our pool: equal to its own attention, or refused at start."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from tiny_models import SIZES, Paged, assert_all_ways_equal_transformers, own_logits, text, tiny

from kvhive.proto.errors import ModelError
from kvhive.worker.model_config import read_model_config
from kvhive.worker.model_identity import model_identity
from kvhive.worker.model_loader import load_model
from kvhive.worker.model_runner import Chunk
from kvhive.worker.runner_loader import load_runner
from kvhive.worker.sequence import SamplingParams
from kvhive.worker.transformers_model import TransformersModel

EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "GPTNeoX": {"rotary_pct": 0.25, "num_key_value_heads": None},
    "Olmo2": {},
    "Phi3": {"sliding_window": 12},
    "Starcoder2": {"sliding_window": 12},
    "Granite": {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "logits_scaling": 3.0},
    "Cohere2": {"sliding_window": 12, "num_hidden_layers": 5},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": None},
    "Mixtral": EXPERTS,
    "Qwen3Moe": EXPERTS | {"head_dim": 16},
}
GREEDY = SamplingParams(max_tokens=8)


def make(family):
    """A tiny model of a family; None takes a size away that the family does not know."""
    changes = FAMILIES[family]
    absent = {name for name, value in changes.items() if value is None}
    model = tiny(family, **{name: value for name, value in changes.items() if value is not None})
    for name in absent:
        delattr(model.config, name)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_all_ways_of_computing_equal_transformers_own_attention(tmp_path, family):
    model = make(family)
    model.save_pretrained(tmp_path, max_shard_size="90KB")
    assert_all_ways_equal_transformers(tmp_path, model)
    assert isinstance(Paged(tmp_path).model, TransformersModel)


def test_the_runner_generates_what_transformers_does_past_the_window(tmp_path):
    model = make("Starcoder2")
    model.save_pretrained(tmp_path)
    runner = load_runner(tmp_path, num_blocks=8, block_size=8)
    assert runner.eos_token_ids == {2, 7}
    tokens, start = text(33), 0
    while len(tokens) < 41:
        chunk = Chunk(tokens[start:], start, list(range(8)), GREEDY, tokens, 33)
        start = len(tokens)
        tokens = [*tokens, *runner.run([chunk])[0].tokens]
    assert tokens[33:] == own_logits(model, tokens).argmax(-1).tolist()[32:-1]


def test_a_step_that_asks_for_no_logits_gets_none(tmp_path):
    make("Olmo2").save_pretrained(tmp_path)
    runner = load_runner(tmp_path, num_blocks=8, block_size=8)
    assert runner.run([Chunk(text(9), 0, [0, 1], None)])[0].tokens == ()


def test_two_models_in_one_process_do_not_disturb_each_other(tmp_path):
    """Our attention is registered once, by name: which pool it writes to is the running step's."""
    one, two = make("Olmo2"), make("Phi3")
    one.save_pretrained(tmp_path / "one")
    two.save_pretrained(tmp_path / "two")
    first, second = Paged(tmp_path / "one"), Paged(tmp_path / "two")
    for paged, model in ((first, one), (second, two), (first, one)):
        torch.testing.assert_close(paged.logits(text(20)), own_logits(model, text(20)), rtol=0, atol=2e-4)


def test_sixteen_bit_weights_pass_the_check(tmp_path):
    make("Qwen3Moe").to(torch.bfloat16).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert config.checkpoint_dtype == "bfloat16"
    load_model(tmp_path, config, torch.bfloat16, "cpu")


def save(path, family, **changes):
    """A tiny model of a family that needs not be servable."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)


REFUSED_ON_LOADING = {
    "Bloom": ({"n_layer": 2, "n_head": 4}, "attention cannot be replaced"),
    "Mamba": ({"state_size": 8}, "heads|recurrent state"),
    "GptOss": ({"num_local_experts": 4, "head_dim": 16}, "GptOssAttention asks its attention for s_aux"),
    "GPTNeoX": ({}, r"GPTNeoXAttention has keys \(1, 4, 22, 16\)"),
    "Jamba": ({"num_experts": 2}, "recurrent state|layers of type"),
}


@pytest.mark.parametrize("family", REFUSED_ON_LOADING)
def test_what_our_attention_cannot_compute_is_refused_by_name(tmp_path, family):
    changes, reason = REFUSED_ON_LOADING[family]
    save(tmp_path, family, **changes)
    with pytest.raises(ModelError, match=f"'{family}ForCausalLM' is not supported: .*({reason})"):
        load_runner(tmp_path, num_blocks=2)


REFUSED_ON_READING = {
    "encoder and decoder": ({"is_encoder_decoder": True}, "an encoder and a decoder"),
    "custom code": ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "brings its own code"),
    "no causal model": ({"architectures": ["BertForMaskedLM"]}, "'BertForMaskedLM'.*does not continue text"),
    "recurrent layers": ({"layer_types": ["full_attention", "linear_attention"] * 2}, "linear_attention"),
    "length-dependent rope": ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantized"),
    "no layers": ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    "absurd layers": ({"num_hidden_layers": 10**6}, "layers must be 1 to 4096"),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED_ON_READING.values(), ids=REFUSED_ON_READING.keys())
def test_what_config_json_rules_out_is_refused_without_loading(tmp_path, change, reason):
    make("Olmo2").save_pretrained(tmp_path)
    edit(tmp_path, change)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=reason):
        read_model_config(tmp_path)


def edit(directory, change):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_weights_that_do_not_fit_and_pickles_are_refused(tmp_path):
    model = make("Olmo2")
    for index, (change, reason) in enumerate(
        [
            ({"num_hidden_layers": 4}, "missing keys.*model.layers.3"),
            ({"num_hidden_layers": 2}, "unexpected keys.*model.layers.2"),
            ({"intermediate_size": 95}, "mismatch"),
            ({"vocab_size": 102}, "mismatch"),
            ({"architectures": ["NobodyForCausalLM"]}, "NobodyForCausalLM.*transformers would read it as"),
            ({"model_type": "nobody"}, "transformers cannot load it"),
        ]
    ):
        path = tmp_path / str(index)
        model.save_pretrained(path)
        edit(path, change)
        with pytest.raises(ModelError, match=reason):
            load_runner(path, num_blocks=2)
    path = tmp_path / "pickle"
    model.save_pretrained(path)
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"canary")
    with pytest.raises(ModelError, match="cannot load it"):
        load_runner(path, num_blocks=2)


def test_a_model_whose_attention_ignores_its_window_is_refused(tmp_path):
    """The configuration slides, the layers do not ask for it: long texts would differ silently."""
    make("Olmo2").save_pretrained(tmp_path)
    edit(tmp_path, {"sliding_window": 12})
    with pytest.raises(ModelError, match="window of 12, but asks for None"):
        load_runner(tmp_path, num_blocks=2)


def test_whatever_changes_kv_changes_the_identity(tmp_path):
    make("Granite").save_pretrained(tmp_path / "one")
    seen = {model_identity(tmp_path / "one", "float32", 16)}
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    edit(tmp_path / "copy", {"transformers_version": "9"})
    assert {model_identity(tmp_path / "copy", "float32", 16)} == seen
    edit(tmp_path / "copy", {"embedding_multiplier": 3.0})
    assert model_identity(tmp_path / "copy", "float32", 16) not in seen


def test_kv_in_eight_bits_is_refused(tmp_path):
    make("OPT").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"workers\.kv_dtype: transformers computes this model"):
        load_runner(tmp_path, num_blocks=8, kv_dtype="fp8")
