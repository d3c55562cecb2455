"""A pool of eight bits: half the memory, close answers, and a cached one still is the cold one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from real_engine import BLOCK, CONTEXT, VOCABULARY, RealEngine, request, tiny_model

from kvhive.proto.errors import ModelError
from kvhive.worker.kv_cache import PoolSpec
from kvhive.worker.model_runner import Chunk
from kvhive.worker.runner_loader import load_runner
from kvhive.worker.sequence import SamplingParams

GREEDY = SamplingParams(max_tokens=1, logprobs=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "target", 2, 1)


def test_a_block_takes_a_byte_for_each_number(model: Path) -> None:
    wide, eight = (load_runner(model, num_blocks=5, kv_dtype=kind) for kind in ("auto", "fp8"))
    assert eight.pool.dtype == torch.float8_e4m3fn and eight.dtype_name == wide.dtype_name
    assert eight.pool.nbytes == wide.pool.nbytes // 4 == 5 * eight.shape.block_bytes(16)


def test_answers_stay_close(demo_gguf: Path) -> None:
    """Of a model that people use: the likeliest token of most texts, and nearly its probability."""
    rng, prompts = random.Random(0), []
    for length in (5, 20, 40, 60, 90, 120):
        prompts.append([rng.randrange(1000, 20000) for _ in range(length)])
    found = []
    for kind in ("auto", "fp8"):
        runner = load_runner(demo_gguf, num_blocks=8, kv_dtype=kind)
        found.append([runner.run([Chunk(prompt, 0, range(8), GREEDY)])[0] for prompt in prompts])
    same = [(one, two) for one, two in zip(*found, strict=True) if one.tokens == two.tokens]
    assert len(same) >= 4
    assert all(abs(one.logprobs[0].logprob - two.logprobs[0].logprob) < 0.5 for one, two in same)
    assert any(one.logprobs != two.logprobs for one, two in zip(*found, strict=True)), "it was not used"


def test_cached_and_cut_prompts_answer_as_cold_ones(model: Path) -> None:
    """What is attended to is what is in the pool, whoever wrote it, in however many steps."""
    rng = random.Random(1)
    system = [rng.randrange(VOCABULARY) for _ in range(4 * BLOCK)]
    asked = [request(f"q{i}", [*system, *range(i, 2 * i)], 5) for i in range(1, 5)]
    cold = RealEngine(model, blocks=40, budget=CONTEXT, kv_dtype="fp8").run_cold(*asked)
    warm = RealEngine(model, blocks=40, budget=7, kv_dtype="fp8")
    warm.run(request("system", [*system, 1], 1))
    for seq, tokens in zip(asked, cold, strict=True):
        assert warm.run(seq) == [tokens] and warm.cached(seq.request_id) == 4 * BLOCK


def test_a_device_that_knows_no_eight_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    message = r"workers\.kv_dtype: fp8 needs .* 8\.9 or more, cuda:0 \(NVIDIA A100\) has 8\.0"
    with pytest.raises(ModelError, match=message):
        PoolSpec(4, 16, "fp8").torch_dtype(torch.bfloat16, torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert PoolSpec(4, 16, "fp8").torch_dtype(torch.bfloat16, torch.device("cuda:0")).itemsize == 1
    with pytest.raises(ValueError, match="kv_dtype: must be auto or fp8, is 'int8'"):
        PoolSpec(4, 16, "int8").torch_dtype(torch.bfloat16, torch.device("cpu"))
