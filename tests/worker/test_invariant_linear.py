"""`workers.deterministic`: the linear layers of a model are those of one kernel, on a GPU only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from real_engine import tiny_model

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder import DecoderModel
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.invariant_linear import InvariantLinear
from kvhive.worker.linear import Linear
from kvhive.worker.model_config import read_model_config
from kvhive.worker.model_loader import load_model
from kvhive.worker.pool_size import DeviceMemory
from kvhive.worker.runner_loader import load_runner
from kvhive.worker.transformers_config import TransformersConfig


def test_it_computes_what_the_other_one_computes() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(70, 48), torch.randn(70), torch.randn(5, 48)
    for added in (None, bias):
        layer = InvariantLinear(weight, added)
        layer.pack()
        torch.testing.assert_close(layer(x), Linear(weight, added)(x))
        assert layer(x[:0]).shape == (0, 70)


def test_all_layers_of_a_model_are_invariant_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", 2, 1)
    config = read_model_config(path)
    model = load_model(path, config, torch.float32, "cpu", invariant=True)
    assert isinstance(model, DecoderModel)
    weights = model._weights
    linears = [weights.head]
    for layer in weights.layers:
        linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
    assert len(linears) == 9 and all(isinstance(each, InvariantLinear) for each in linears)


def test_a_cpu_needs_none(tmp_path: Path) -> None:
    memory = DeviceMemory(0.9, 512, 16, deterministic=True)
    runner = load_runner(tiny_model(tmp_path / "model", 1, 1), num_blocks=2, memory=memory)
    assert not isinstance(runner._model._weights.head, InvariantLinear)  # type: ignore[attr-defined]


def test_a_model_that_transformers_computes_is_refused(tmp_path: Path) -> None:
    config = object.__new__(TransformersConfig)
    assert not isinstance(config, DecoderConfig)
    with pytest.raises(ModelError, match=r"workers\.deterministic: transformers computes this model"):
        load_model(tmp_path, config, torch.float32, "cuda", invariant=True)
