"""The most that this CPU could do in the workloads of `kvhive bench engine`, from what it measures now.

    python -m kvhive.scripts.bench_limits [--model PATH] [--dtype float32] [--weight-bytes 2] [--threads 2]

Two rates bound every step: how fast weights and KV are read from memory, and how fast matrices are multiplied
at the model's own shapes. A step takes at least the longer of the two; a workload takes their sum over its
steps, prompts apart from output, a shared prefix computed once. Nothing is granted for softmax, norms,
sampling or Python: those are what stands between a server and this limit.

kvhive keeps a checkpoint in bfloat16 as it is even where it computes in float32: then --weight-bytes is 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import click
import torch

from kvhive.proto.errors import ModelError
from kvhive.scripts.bench_workloads import WORKLOADS, TokenRange, Workload, workload
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.linear import Linear
from kvhive.worker.model_config import read_model_config
from kvhive.worker.model_path import resolve_model

_READ_BYTES = 1 << 30
_ROWS = 512
_RUNS = 7


@dataclass(frozen=True, slots=True)
class CpuRates:
    """What this machine does at best with the given threads."""

    read_bytes_s: float
    multiply_flop_s: float


@dataclass(frozen=True, slots=True)
class ItemSizes:
    """Bytes of one weight and of one number of the KV."""

    weight: int
    kv: int


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time of a workload, and what follows from it."""

    prefill_s: float
    decode_s: float
    output_tok_s: float
    total_tok_s: float


def measure_rates(config: DecoderConfig, dtype: torch.dtype) -> CpuRates:
    """Read a gigabyte, and multiply 512 rows by every matrix of one layer; the best of several runs each.

    Products are torch's own and those of packed layers, whichever are faster.
    """
    numbers = torch.ones(_READ_BYTES // 4)
    read_s = _best(numbers.sum)
    layers = [Linear(torch.randn(rows, columns).to(dtype)) for rows, columns in _matrices(config)]
    inputs = [torch.randn(_ROWS, columns).to(dtype) for _, columns in _matrices(config)]
    flop = sum(2 * _ROWS * rows * columns for rows, columns in _matrices(config))
    plain_s = _best(lambda: [layer(x) for layer, x in zip(layers, inputs, strict=True)])
    for layer in layers:
        layer.pack()
    packed_s = _best(lambda: [layer(x) for layer, x in zip(layers, inputs, strict=True)])
    return CpuRates(_READ_BYTES / read_s, flop / min(plain_s, packed_s))


def bound_of(work: Workload, config: DecoderConfig, sizes: ItemSizes, rates: CpuRates) -> Bound:
    """Return the least time of a workload: prompts at the matrix rate, then steps of full batches."""
    shared = _shared_tokens(work)
    prefill = _prefill_flop(config, 0, shared) + sum(
        _prefill_flop(config, shared, len(ask.prompt)) for ask in work.asks
    )
    prefill_s = prefill / rates.multiply_flop_s
    batch, decode_s = work.concurrency, 0.0
    for first in range(0, len(work.asks), batch):
        asks = work.asks[first : first + batch]
        for step in range(max(ask.max_tokens for ask in asks) - 1):
            contexts = [len(ask.prompt) + step for ask in asks]
            decode_s += _decode_s(config, sizes, contexts, rates)
    output = sum(ask.max_tokens for ask in work.asks)
    total = output + sum(len(ask.prompt) for ask in work.asks)
    wall = prefill_s + decode_s
    return Bound(prefill_s, decode_s, output / wall, total / wall)


def _decode_s(config: DecoderConfig, sizes: ItemSizes, contexts: list[int], rates: CpuRates) -> float:
    weights = _layer_elements(config) * config.layers + config.vocab_size * config.hidden_size
    kv = 2 * config.layers * config.kv_heads * config.head_dim * sum(contexts)
    flop = 2 * weights * len(contexts) + 4 * config.layers * config.heads * config.head_dim * sum(contexts)
    read = weights * sizes.weight + kv * sizes.kv
    return max(read / rates.read_bytes_s, flop / rates.multiply_flop_s)


def _prefill_flop(config: DecoderConfig, cached: int, end: int) -> float:
    """Multiply-adds, counted as two, of the tokens from `cached` to `end`; the head counts for the last."""
    tokens, pairs = end - cached, (end * (end + 1) - cached * (cached + 1)) / 2
    attention = 4 * config.layers * config.heads * config.head_dim * pairs
    return 2 * _layer_elements(config) * config.layers * tokens + attention


def _matrices(config: DecoderConfig) -> list[tuple[int, int]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    return [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]


def _layer_elements(config: DecoderConfig) -> int:
    return sum(rows * columns for rows, columns in _matrices(config))


def _shared_tokens(work: Workload) -> int:
    """Return how many leading tokens all prompts of a workload have in common."""
    shortest, longest = min(ask.prompt for ask in work.asks), max(ask.prompt for ask in work.asks)
    equal = (a == b for a, b in zip(shortest, longest, strict=False))
    return next((i for i, same in enumerate(equal) if not same), len(shortest)) if len(work.asks) > 1 else 0


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


@click.command()
@click.option("--model", default="demo", show_default=True, help="A directory, a .gguf file, or `demo`.")
@click.option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]), show_default=True)
@click.option("--weight-bytes", type=click.IntRange(1, 4), help="As they are stored; by default as --dtype.")
@click.option("--threads", default=2, type=click.IntRange(1, 1024), show_default=True)
def main(model: str, dtype: str, weight_bytes: int | None, threads: int) -> None:
    """Measure this CPU and print the bound of each workload."""
    torch.set_num_threads(threads)
    config = read_model_config(resolve_model(model))
    if not isinstance(config, DecoderConfig):
        raise ModelError(f"{model}: only the shapes of kvhive's own decoder are known here")
    element = getattr(torch, dtype)
    sizes = ItemSizes(weight_bytes or element.itemsize, element.itemsize)
    with torch.inference_mode():
        rates = measure_rates(config, element)
    click.echo(
        f"reads {rates.read_bytes_s / 1e9:.1f} GB/s, multiplies {rates.multiply_flop_s / 1e9:.0f} GFLOP/s"
    )
    for name in WORKLOADS:
        bound = bound_of(workload(name, "limits", TokenRange()), config, sizes, rates)
        click.echo(
            f"({name}) prefill {bound.prefill_s:6.1f} s, decode {bound.decode_s:6.1f} s: at most "
            f"{bound.output_tok_s:6.1f} output tok/s, {bound.total_tok_s:7.1f} tok/s in all"
        )
    for batch, context in ((1, 128), (8, 128), (8, 1120)):
        seconds = _decode_s(config, sizes, [context] * batch, rates)
        click.echo(f"a decode step of {batch} at {context} tokens: at least {1e3 * seconds:.1f} ms")


if __name__ == "__main__":
    main()
