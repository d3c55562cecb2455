"""Ranks that share a model compute what one computes alone: logits, tokens, hits. Processes, on gloo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import pytest
import torch
from rank_rig import RankProcesses, rank_options
from real_engine import BLOCK, RealEngine, request, tiny_model
from tiny_models import text, tiny, write_gguf
from tiny_variants import ONLY_SAFETENSORS, VARIANTS

from kvhive.worker.model_runner import Chunk
from kvhive.worker.runner_loader import load_worker_runner
from kvhive.worker.sequence import SamplingParams
from kvhive.worker.torch_runner import TorchModelRunner

ALL = VARIANTS | ONLY_SAFETENSORS
PROMPT = SamplingParams(1, prompt_logprobs=1)
BIASES = {"attention_bias": True, "mlp_bias": True}
UNEVEN = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 90,
}
FEW_KEYS = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 107,
}


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    made = RankProcesses()
    yield made
    made.close()


def logits(runner: TorchModelRunner, tokens: Sequence[int]) -> torch.Tensor:
    """Of every position: a chunk, another beside a stranger's, and the last token alone."""
    table, other, last = range(10), range(10, 14), len(tokens) - 1

    def part(start: int, end: int) -> Chunk:
        return Chunk(tokens[start:end], start, table, PROMPT, prompt_logprobs=1)

    rows = []
    with torch.inference_mode():
        rows.append(runner._logits([part(0, 33)]).clone())
        both = runner._logits([Chunk(text(20), 0, other, None), part(33, last)])
        rows += [both.clone(), runner._logits([part(last, last + 1)]).clone()]
    return torch.cat(rows)


def assert_shared_equals_alone(
    processes: RankProcesses, path: Path, ranks: int, vocabulary: int = 101, device: str = "cpu"
) -> None:
    options, tokens = rank_options(path, device=device), text(70)
    expected = logits(load_worker_runner(options), tokens)
    with processes.runner(ranks, options) as runner:
        shared = logits(runner, tokens)
    assert shared.shape == (70, vocabulary)
    torch.testing.assert_close(shared, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("variant", ALL)
def test_two_ranks_compute_the_logits_of_one(processes: RankProcesses, tmp_path: Path, variant: str) -> None:
    family, changes = ALL[variant]
    tiny(family, **changes).save_pretrained(tmp_path, max_shard_size="90KB")
    assert_shared_equals_alone(processes, tmp_path, ranks=2)


@pytest.mark.parametrize(
    ("ranks", "family", "changes"),
    [
        (2, "Llama", UNEVEN | BIASES),
        (3, "Llama", BIASES),
        (3, "Qwen2", FEW_KEYS),
        (4, "Llama", FEW_KEYS | BIASES | {"tie_word_embeddings": True}),
        (4, "Qwen3", {"head_dim": 16}),
        (4, "Gemma2", {"head_dim": 16, "sliding_window": 9, "final_logit_softcapping": 4.0}),
    ],
)
def test_nothing_has_to_divide(
    processes: RankProcesses, tmp_path: Path, ranks: int, family: str, changes: dict[str, object]
) -> None:
    """Heads, feed-forward and vocabulary (fault 103) in unequal parts; KV heads that several ranks hold."""
    tiny(family, **changes).save_pretrained(tmp_path)
    assert_shared_equals_alone(processes, tmp_path, ranks, int(changes.get("vocab_size", 101)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("variant", ["llama, yarn", "qwen2, qkv bias", "gemma2, soft caps"])
def test_two_gpus_compute_the_logits_of_one(processes: RankProcesses, tmp_path: Path, variant: str) -> None:
    family, changes = VARIANTS[variant]
    tiny(family, **changes).save_pretrained(tmp_path)
    assert_shared_equals_alone(processes, tmp_path, ranks=2, device="cuda:0")


@pytest.mark.parametrize("variant", ["qwen2, qkv bias", "qwen3, q and k norms", "gemma3, two ropes"])
def test_gguf_is_shared_alike(processes: RankProcesses, tmp_path: Path, variant: str) -> None:
    family, changes = VARIANTS[variant]
    path = write_gguf(tmp_path / "model.gguf", tiny(family, **changes))
    assert_shared_equals_alone(processes, path, ranks=3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_quantised_tensors_are_cut_after_they_are_dequantised(
    processes: RankProcesses, tmp_path: Path, kind: str
) -> None:
    """Parts need not begin where blocks of 32 do; Llama's rows are rearranged in GGUF."""
    model = tiny("Llama", hidden_size=96, intermediate_size=160, num_attention_heads=6, head_dim=16)
    quantised = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "model.gguf", model, quantization=quantised)
    assert_shared_equals_alone(processes, path, ranks=3)


def test_greedy_tokens_and_prefix_hits_are_those_of_one_rank(
    processes: RankProcesses, tmp_path: Path
) -> None:
    """50 prompts in groups that share beginnings, through scheduler, pool and preemption."""
    model, blocks = tiny_model(tmp_path, layers=2, seed=3), 80
    prompts = [[(7 * i + 3 * (i // 40) * p + p % 10) % 300 for i in range(40 + p)] for p in range(50)]
    asked = [request(f"r{index}", prompt, 12) for index, prompt in enumerate(prompts)]
    alone = RealEngine(model, blocks, budget=64)
    expected = alone.run(*asked)
    options = rank_options(model, block_size=BLOCK, pool_tokens=blocks * BLOCK)
    with processes.runner(2, options) as runner:
        shared = RealEngine(model, blocks, budget=64, target=runner)
        assert shared.run(*asked) == expected
        hits = [shared.cached(seq.request_id) for seq in asked]
    assert hits == [alone.cached(seq.request_id) for seq in asked] and sum(map(bool, hits)) > 25


def test_a_draft_model_on_the_first_rank_changes_no_token(processes: RankProcesses, tmp_path: Path) -> None:
    model, draft = tiny_model(tmp_path / "a", layers=2, seed=3), tiny_model(tmp_path / "b", layers=1, seed=4)
    asked = [request(f"r{p}", range(p, 30 + p), 12) for p in range(4)]
    expected = RealEngine(model, 64, budget=64).run(*asked)
    options = rank_options(model, block_size=BLOCK, pool_tokens=64 * BLOCK)
    with processes.runner(2, options) as runner:
        drafting = RealEngine(model, 64, budget=64, draft="draft", draft_model=draft, target=runner)
        assert drafting.run(*asked) == expected
        assert sum(drafting.outputs[seq.request_id][-1].drafted for seq in asked) > 0


def test_a_row_s_bits_do_not_depend_on_its_batch_mates(processes: RankProcesses, tmp_path: Path) -> None:
    """With three ranks the order of a sum counts, and it is always the ranks' own."""
    tiny("Llama", **UNEVEN).save_pretrained(tmp_path)
    own = Chunk(text(17), 0, range(4), PROMPT)
    others = [Chunk(text(9 + i, seed=i), 0, range(4 + 3 * i, 7 + 3 * i), PROMPT) for i in range(4)]
    with processes.runner(3, rank_options(tmp_path)) as runner, torch.inference_mode():
        alone = runner._logits([own]).clone()
        assert torch.equal(runner._logits([*others, own])[-1:], alone)


def test_a_batch_beyond_one_message_arrives_whole(processes: RankProcesses, tmp_path: Path) -> None:
    tiny("Llama", max_position_embeddings=4096).save_pretrained(tmp_path)
    options = rank_options(tmp_path, pool_tokens=8192)
    chunk = Chunk(text(3000), 0, range(375), SamplingParams(1))
    with torch.inference_mode():
        expected = load_worker_runner(options)._logits([chunk])
    with processes.runner(2, options) as runner, torch.inference_mode():
        torch.testing.assert_close(runner._logits([chunk]), expected, rtol=0, atol=2e-4)
