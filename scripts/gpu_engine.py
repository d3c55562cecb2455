"""The engine on random weights of a large model's shape: steps as multiples of what memory allows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from kvhive.proto.block_hash import root_hash
from kvhive.scripts.gpu_limits import Limits
from kvhive.worker.block_pool import BlockPool
from kvhive.worker.decoder import DecoderModel
from kvhive.worker.decoder_config import DecoderConfig, Rope
from kvhive.worker.engine import Engine, EngineHooks, Output
from kvhive.worker.kv_cache import PoolSpec
from kvhive.worker.kv_cache_manager import KvCacheManager
from kvhive.worker.model_runner import Chunk
from kvhive.worker.pool_size import DeviceMemory
from kvhive.worker.scheduler import Scheduler, SchedulerLimits
from kvhive.worker.sequence import SamplingParams, Sequence
from kvhive.worker.torch_runner import TorchModelRunner

BLOCK = 16
MOST_LOGPROB_DIFFERENCE = 0.1
"""Between two orders of the same sums in bfloat16. Random weights have near ties: some tokens may differ."""
_GREEDY = SamplingParams(max_tokens=1)


def shape_of(dry: bool) -> DecoderConfig:
    """Return Llama-3-8B's shape, or a miniature of it."""
    hidden, inner, layers, heads, kv_heads, vocab = (
        (256, 512, 2, 4, 2, 1000) if dry else (4096, 14_336, 32, 32, 8, 128_256)
    )
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_context=512 if dry else 16_384,
        rms_norm_eps=1e-5,
        rope=Rope(500_000.0),
        tie_embeddings=False,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        eos_token_ids=frozenset(),
        checkpoint_dtype="bfloat16",
        attention_scale=(hidden // heads) ** -0.5,
    )


def random_weights(config: DecoderConfig, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random tensors under Hugging Face names, made on the device."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield name, matrix(config.vocab_size, hidden)
    yield "model.norm.weight", torch.ones(hidden, device=device)
    for index in range(config.layers):
        for name, (rows, columns) in matrices.items():
            yield f"model.layers.{index}.{name}.weight", matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{index}.{name}.weight", torch.ones(hidden, device=device)


def make_runner(device: torch.device, dry: bool) -> TorchModelRunner:
    """Load the random model and give it a pool: on CUDA what fits, elsewhere a little."""
    config = shape_of(dry)
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    with torch.inference_mode():
        model = DecoderModel(config, random_weights(config, device), getattr(torch, dtype), device)
    memory = DeviceMemory(utilization=0.9, max_step_tokens=8192, max_running=256)
    blocks = 256 if device.type == "cpu" else 0
    return TorchModelRunner(model, config, dtype, device, PoolSpec(blocks, BLOCK), memory=memory)


def check_engine(runner: TorchModelRunner, dry: bool) -> dict[str, Any]:
    """Compute the same three sequences in two ways and compare what the tokens were worth.

    One way is whole prompts, then steps of one token: CUDA graphs, padded from 3 to 4. The other is prompts
    in pieces of which nothing is read, then all tokens at once as drafts: no graph, other kernels and blocks.
    """
    length, steps, piece = (90, 6, 37) if dry else (1500, 12, 512)
    each = -(-(length + steps) // BLOCK)
    prompts = [torch.randint(0, runner.shape.vocab_size, (length,)).tolist() for _ in range(3)]
    tables = [list(range(i * each, (i + 1) * each)) for i in range(6)]
    sampling = SamplingParams(max_tokens=steps, logprobs=0)

    def chunk(i: int, start: int, tokens: list[int], last: bool, drafts: tuple[int, ...] = ()) -> Chunk:
        return Chunk(
            tokens, start, tables[i], sampling if last else None, prompt_tokens=length, drafts=drafts
        )

    single = [[result] for result in runner.run([chunk(i, 0, prompts[i], True) for i in range(3)])]
    for step in range(1, steps):
        chunks = [chunk(i, length + step - 1, [*single[i][-1].tokens], True) for i in range(3)]
        for results, result in zip(single, runner.run(chunks), strict=True):
            results.append(result)
    for start in range(0, length - 1, piece):
        part = slice(start, min(start + piece, length - 1))
        runner.run([chunk(i + 3, start, prompts[i][part], False) for i in range(3)])
    drafts = [tuple(token for result in results for token in result.tokens) for results in single]
    at_once = runner.run([chunk(i + 3, length - 1, prompts[i][-1:], True, drafts[i][:-1]) for i in range(3)])
    pairs = [
        (one.logprobs[0].logprob, other.logprob)
        for results, result in zip(single, at_once, strict=True)
        for one, token, other in zip(results, result.tokens, result.logprobs, strict=False)
        if one.tokens[0] == token
    ]
    difference = max((abs(a - b) for a, b in pairs), default=float("inf"))
    return {
        "case": "engine, two ways",
        "tokens": 3 * steps,
        "agreed": len(pairs),
        "difference": difference,
        "right": difference < MOST_LOGPROB_DIFFERENCE and len(pairs) >= steps,
    }


def weight_bytes(config: DecoderConfig, itemsize: int) -> int:
    """Bytes of the weights that a step reads: all but the embedding."""
    heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return itemsize * (config.layers * layer + config.hidden_size * config.vocab_size)


def time_decode(runner: TorchModelRunner, limits: Limits, dry: bool) -> list[dict[str, Any]]:
    """Time decode steps of many batches and contexts against (weights + KV) / bandwidth."""
    config = shape_of(dry)
    itemsize = runner.shape.bytes_per_element
    per_token = runner.shape.block_bytes(1)
    weights = weight_bytes(config, itemsize)
    rows = []
    for batch in (1, 4) if dry else (1, 16, 64, 256):
        for context in (32, 100) if dry else (1024, 4096, 8192):
            each = context // BLOCK + 1
            if batch * each > runner.num_blocks:
                continue
            chunks = [
                Chunk([1], context, range(i * each, (i + 1) * each), _GREEDY, prompt_tokens=context)
                for i in range(batch)
            ]
            took = _median_run(runner, chunks)
            # A copy reads and writes each byte, a step only reads: the copy's rate counts both.
            floor = (weights + batch * context * per_token) / limits.copy_bytes_s
            rows.append({"case": f"decode {batch} x {context}", "ms": took * 1e3, "of_floor": took / floor})
    return rows


def time_prefill(runner: TorchModelRunner, dry: bool) -> list[dict[str, Any]]:
    """Time whole prompts in one step: tokens a second."""
    rows = []
    for tokens in (64,) if dry else (512, 2048, 8192):
        blocks = range(-(-tokens // BLOCK))
        took = _median_run(runner, [Chunk([1] * tokens, 0, blocks, _GREEDY, prompt_tokens=tokens)])
        rows.append({"case": f"prefill {tokens}", "ms": took * 1e3, "tokens_s": tokens / took})
    return rows


def time_to_first_token(runner: TorchModelRunner, dry: bool) -> dict[str, float]:
    """Ask twice for prompts with one prefix: medians of the cold and the warm time to the first token."""
    prefix, unique = (128, 16) if dry else (1024, 64)
    outputs: list[Output] = []
    manager = KvCacheManager(BlockPool(runner.num_blocks), BLOCK, root_hash(b"check"), time.monotonic)
    scheduler = Scheduler(manager, SchedulerLimits(8192, 16, 16))
    hooks = EngineHooks(outputs.extend, lambda events: None)
    engine = Engine(runner, scheduler, hooks, time.monotonic)

    def ask(name: str, first: int, last: int) -> float:
        tokens = [first] * prefix + [last] * unique
        began = time.perf_counter()
        engine.submit(Sequence(name, tokens, len(tokens), SamplingParams(max_tokens=1)))
        while not outputs:
            engine.step()
        outputs.clear()
        return time.perf_counter() - began

    for i in range(2):  # whatever compiles at the first call
        ask(f"w{i}", 700, 701 + i)
    cold, warm = [], []
    for i in range(5):
        cold.append(ask(f"c{i}", 10 + i, 20 + i))
        warm.append(ask(f"h{i}", 10 + i, 30 + i))
    ratio = statistics.median(warm) / statistics.median(cold)
    return {
        "cold_ms": statistics.median(cold) * 1e3,
        "warm_ms": statistics.median(warm) * 1e3,
        "warm_of_cold": ratio,
    }


def step_overhead(runner: TorchModelRunner) -> dict[str, float]:
    """Return what a decode step of one sequence takes on the host beyond what the device computes."""
    chunks = [Chunk([1], 100, range(7), _GREEDY, prompt_tokens=100)]
    took = _median_run(runner, chunks)
    busy = _device_seconds(runner, chunks)
    return {"step_us": took * 1e6, "device_us": busy * 1e6, "overhead_us": (took - busy) * 1e6}


def _median_run(runner: TorchModelRunner, chunks: list[Chunk], runs: int = 12) -> float:
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        runner.run(chunks)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def _device_seconds(runner: TorchModelRunner, chunks: list[Chunk]) -> float:
    """Return how long the device is busy with a step; on the CPU that is all of it."""
    if not torch.cuda.is_available():
        return _median_run(runner, chunks)
    times: list[float] = []
    for _ in range(10):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            runner.run(chunks)
        times.append(sum(event.self_device_time_total for event in profile.key_averages()) / 1e6)
    return statistics.median(times)
