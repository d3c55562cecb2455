"""Two models have one identity exactly when their KV is interchangeable."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from kvhive.proto.errors import ModelError
from kvhive.worker.model_identity import model_identity

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "eos_token_id": 2,
}  # fmt: skip


def write(directory, tensors, config=CONFIG, shards=1):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = sorted(tensors)
    weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {"a": torch.randn(100, 100), "b": torch.randn(7), "c": torch.randn(3, 5)}


def test_place_and_sharding_do_not_matter(tmp_path, tensors):
    one = write(tmp_path / "one", tensors)
    identity = model_identity(one, "float32", 16)
    assert len(identity) == 32
    assert identity == model_identity(shutil.copytree(one, tmp_path / "two"), "float32", 16)
    assert identity == model_identity(write(tmp_path / "three", tensors, shards=2), "float32", 16)


def test_whatever_changes_kv_changes_the_identity(tmp_path, tensors):
    base = write(tmp_path / "base", tensors)
    seen = {model_identity(base, dtype, size) for dtype in ("float32", "bfloat16") for size in (16, 32)}
    seen |= {model_identity(base, dtype, 16, "fp8") for dtype in ("float32", "bfloat16")}
    assert len(seen) == 6
    changed = [dict(tensors) for _ in range(4)]
    changed[0]["a"] = tensors["a"].clone()
    changed[0]["a"][50, 17] += 1e-3  # one value of one tensor
    changed[1]["d"] = changed[1].pop("c")
    changed[2]["c"] = tensors["c"].reshape(5, 3)
    changed[3]["b"] = tensors["b"].view(torch.int32)
    for index, variant in enumerate(changed):
        seen.add(model_identity(write(tmp_path / f"changed{index}", variant), "float32", 16))
    for key, value in (("rope_theta", 5000.0), ("rms_norm_eps", 1e-6), ("num_attention_heads", 4)):
        seen.add(model_identity(write(tmp_path / key, tensors, CONFIG | {key: value}), "float32", 16))
    assert len(seen) == 6 + 4 + 3


def test_above_the_limit_samples_of_every_tensor_count(tmp_path, tensors):
    """What the docstring promises of sampling, and what it does not."""
    base = model_identity(write(tmp_path / "base", tensors), "float32", 16, full_hash_bytes=1000)
    assert base != model_identity(tmp_path / "base", "float32", 16)
    flat = tensors["a"].flatten()  # 40,000 bytes
    edits = (("first", 0, True), ("middle", 5000, True), ("last", 9999, True), ("gap", 2000, False))
    for name, at, seen in edits:
        edited = flat.clone()
        edited[at] += 1
        path = write(tmp_path / name, tensors | {"a": edited.view(100, 100)})
        assert (model_identity(path, "float32", 16, full_hash_bytes=1000) != base) is seen


def test_the_demo_model_has_one(demo_gguf, tmp_path):
    identity = model_identity(demo_gguf, "float32", 16)
    moved = tmp_path / "other name.gguf"
    moved.symlink_to(demo_gguf)
    assert model_identity(moved, "float32", 16) == identity


def test_damage_and_unresolved_dtypes_are_errors(tmp_path, tensors):
    path = write(tmp_path / "model", tensors)
    with pytest.raises(ValueError, match="dtype"):
        model_identity(path, "auto", 16)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-3])
    with pytest.raises(ModelError, match=r"model\.safetensors.*tensor . ends beyond"):
        model_identity(path, "float32", 16)
    with pytest.raises(ModelError, match="cannot be read"):
        model_identity(tmp_path / "absent.gguf", "float32", 16)
