"""Each kernel on a device: equal to the reference, and what share of the device's limits it reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kvhive.kernels.attention_metadata import AttentionMetadata, attention_metadata
from kvhive.kernels.fp8_cache import FP8
from kvhive.kernels.operators import Operators, operators_for
from kvhive.kernels.philox import NoiseStream
from kvhive.kernels.reference.operators import ReferenceOperators
from kvhive.scripts.gpu_limits import Limits, seconds

BLOCK = 16
Case = tuple[str, Callable[[Operators], Any]]


@dataclass(frozen=True, slots=True)
class Paged:
    """A batch over a pool whose every other element is NaN."""

    query: torch.Tensor
    layer: torch.Tensor
    metadata: AttentionMetadata
    kv_bytes: int
    flop: int


def paged(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    spans: list[tuple[int, int]],
    windows: tuple[int | None, ...] = (None,),
    kv_dtype: torch.dtype | None = None,
) -> Paged:
    """Make a batch of (queries, context) in shuffled blocks, for (query heads, KV heads).

    kv_dtype: the pool's, where it is not the queries'
    """
    kv_dtype = kv_dtype or dtype
    counts = [-(-context // BLOCK) for _, context in spans]
    total = sum(counts) + 2
    pool = torch.full((total, 1, 2, heads[1], BLOCK, head_dim), torch.nan, device=device)
    order = torch.randperm(total).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    for table, (_, context) in zip(tables, spans, strict=True):
        values = torch.randn(2, heads[1], len(table) * BLOCK, head_dim, device=device)
        values[:, :, context:] = torch.nan
        shaped = values.view(2, heads[1], len(table), BLOCK, head_dim).permute(2, 0, 1, 3, 4)
        pool[torch.tensor(table, device=device), 0] = shaped
    queries = [count for count, _ in spans]
    contexts = [context for _, context in spans]
    pool = pool.to(kv_dtype)
    metadata = attention_metadata(pool, tables, queries, contexts, windows)
    query = torch.randn(sum(queries), heads[0], head_dim, device=device).to(dtype)
    pairs = sum(q * (c - q) + q * (q + 1) // 2 for q, c in spans)
    kv_bytes = 2 * sum(contexts) * heads[1] * head_dim * kv_dtype.itemsize
    return Paged(query, pool[:, 0], metadata, kv_bytes, 4 * pairs * heads[0] * head_dim)


def check_kernels(device: torch.device, dry: bool) -> list[dict[str, Any]]:
    """Compare every operator with the reference on fresh random inputs: one row per case."""
    ours, oracle = operators_for(torch.empty(0, device=device)), ReferenceOperators()
    rows = []
    for name, case in _cases(device, dry):
        got, expected = case(ours), case(oracle)
        pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (got, expected)), strict=True)
        error = max(_relative_error(a, b) for a, b in pairs)
        rows.append({"case": name, "operators": ours.name, "error": error, "right": error < 2e-2})
    if device.type == "cuda":
        rows.append(_rows_alone(ours, device))
    return rows


def _rows_alone(ours: Operators, device: torch.device) -> dict[str, Any]:
    """Whether rows of a linear layer have the same bits alone, among few and among many."""
    x, weight, bias = _linear(300, device)
    many = ours.linear(x, weight, bias)
    parts = [slice(0, 1), slice(299, 300), slice(20, 84), slice(100, 165)]
    same = all(torch.equal(ours.linear(x[part], weight, bias), many[part]) for part in parts)
    return {"case": "linear: rows alone", "operators": ours.name, "error": float(not same), "right": same}


def _linear(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make x, weight and bias of a layer of Llama-3-8B; on the CPU of a small one."""
    inputs, outputs, dtype = (
        (4096, 6144, torch.bfloat16) if device.type == "cuda" else (64, 96, torch.float32)
    )
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    return x, weight * inputs**-0.5, bias


def time_kernels(device: torch.device, limits: Limits, dry: bool) -> list[dict[str, Any]]:
    """Time attention and linear layers, small to large: shares of the copy bandwidth and the matrix rate."""
    ours = operators_for(torch.empty(0, device=device))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    sizes = [(2, 64)] if dry else [(1, 8192), (16, 1024), (16, 8192), (64, 1024), (64, 4096), (256, 1024)]
    rows = []
    for batch, context in sizes:
        case = paged(device, dtype, (32, 8), 128, [(1, context)] * batch)
        took = seconds(lambda case=case: _attend(ours, case), device)  # type: ignore[misc]
        share = case.kv_bytes / took / limits.copy_bytes_s
        rows.append(_timing(f"decode {batch} x {context}", took, case.kv_bytes / 1e6, "MB of KV", share))
    for batch, context in [(64, 4096)] if _knows_fp8(device) else []:
        case = paged(device, dtype, (32, 8), 128, [(1, context)] * batch, kv_dtype=FP8)
        took = seconds(lambda case=case: _attend(ours, case), device)  # type: ignore[misc]
        share = case.kv_bytes / took / limits.copy_bytes_s
        rows.append(_timing(f"decode {batch} x {context} fp8", took, case.kv_bytes / 1e6, "MB of KV", share))
    for queries, context in [(32, 64)] if dry else [(512, 512), (2048, 2048), (8192, 8192), (2048, 8192)]:
        case = paged(device, dtype, (32, 8), 128, [(queries, context)])
        took = seconds(lambda case=case: _attend(ours, case), device)  # type: ignore[misc]
        rate = case.flop / took
        share = rate / limits.matrix_flop_s
        rows.append(_timing(f"prefill {queries} of {context}", took, rate / 1e12, "TFLOP/s", share))
    for count in (2,) if dry else (1, 64, 2048):
        layer = _linear(count, device)
        flop = 2 * layer[0].numel() * layer[1].shape[0]
        for name, compute in (("linear", ours.linear), ("torch's linear", F.linear)):
            took = seconds(lambda compute=compute, layer=layer: compute(*layer), device)  # type: ignore[misc]
            rate = flop / took
            share = rate / limits.matrix_flop_s
            rows.append(_timing(f"{name} {count} rows", took, rate / 1e12, "TFLOP/s", share))
    return rows


def _knows_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (8, 9))


def _attend(
    operators: Operators, case: Paged, window: int | None = None, cap: float | None = None
) -> torch.Tensor:
    scale = case.query.shape[2] ** -0.5
    return operators.paged_attention(case.query, case.layer, case.metadata, scale, window, cap)


def _timing(name: str, took: float, amount: float, unit: str, share: float) -> dict[str, Any]:
    return {"case": name, "us": took * 1e6, "amount": amount, "unit": unit, "share_of_limit": share}


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest value; infinite where only one of the two is NaN."""
    a, b = got.double(), expected.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    a, b = a.nan_to_num(0.0), b.nan_to_num(0.0)
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def _cases(device: torch.device, dry: bool) -> Iterator[Case]:
    dtypes = [torch.float32] if device.type == "cpu" else [torch.bfloat16, torch.float16, torch.float32]
    long = 40 if dry else 700
    batches = {
        "decodes": [(1, n) for n in (1, 15, 16, 17, long, long + 333)],
        "chunks": [(long, long), (33, long), (5, 40)],
        "mixed": [(7, 7), (1, long), (long // 2, long), (1, 3)],
    }
    for dtype in dtypes:
        label = str(dtype).removeprefix("torch.")
        for heads, head_dim in [((8, 2), 64), ((8, 1), 128), ((4, 4), 96), ((4, 2), 256)]:
            for name, spans in batches.items():
                for window, cap in [(None, None), (48, None), (None, 30.0)]:
                    case = paged(device, dtype, heads, head_dim, spans, (window,))
                    title = f"attention {label} {heads[0]}/{heads[1]} x {head_dim} {name} {window} {cap}"
                    yield title, _bound(case, window, cap)
                if _knows_fp8(device) and dtype != torch.float32:
                    case = paged(device, dtype, heads, head_dim, spans, kv_dtype=FP8)
                    yield f"attention {label} over fp8 {heads} x {head_dim} {name}", _bound(case, None, None)
        yield from _layer_cases(device, dtype, label)


def _bound(case: Paged, window: int | None, cap: float | None) -> Callable[[Operators], Any]:
    return lambda operators: _attend(operators, case, window, cap)


def _layer_cases(device: torch.device, dtype: torch.dtype, label: str) -> Iterator[Case]:
    x, residual = torch.randn(2, 37, 576, device=device).to(dtype)
    weight, gates = torch.randn(576, device=device), torch.randn(37, 1024, device=device).to(dtype)
    angles = torch.randn(2, 37, 32, device=device)
    qkv = torch.randn(37, 12, 64, device=device).to(dtype)
    slots = torch.randperm(8 * BLOCK)[:37].to(device)

    def cached(operators: Operators) -> tuple[torch.Tensor, torch.Tensor]:
        layer = torch.full((8, 2, 2, BLOCK, 64), torch.nan, dtype=dtype, device=device)
        query = operators.rotary_and_cache(qkv.clone(), angles[0], angles[1], layer, slots)
        return query, layer

    def cached_fp8(operators: Operators) -> torch.Tensor:
        layer = torch.full((8, 2, 2, BLOCK, 64), torch.nan, device=device).to(FP8)
        operators.reshape_and_cache(qkv[:, 8:10] * 300, qkv[:, 10:], layer, slots)
        return layer

    logits = torch.randn(5, 49_155, device=device)
    streams = [NoiseStream(seed, 1, 7) for seed in range(5)]
    layer = _linear(150, device)
    yield f"linear {label}", lambda o: o.linear(*(each.to(dtype) for each in layer))
    yield f"rms_norm {label}", lambda o: o.rms_norm(x, weight.to(dtype), 1e-5)
    yield f"rms_norm {label} float32 weight", lambda o: o.rms_norm(x, weight, 1e-5)
    yield (
        f"add_rms_norm {label}",
        lambda o: o.add_rms_norm(x.clone(), residual.clone(), weight.to(dtype), 1e-5),
    )
    yield f"silu_and_mul {label}", lambda o: o.silu_and_mul(gates)
    yield f"gelu_tanh_and_mul {label}", lambda o: o.gelu_tanh_and_mul(gates)
    yield f"rotary_and_cache {label}", cached
    if _knows_fp8(device):
        yield f"reshape_and_cache {label} fp8", cached_fp8
    yield f"greedy {label}", lambda o: o.greedy(logits.to(dtype))
    yield f"gumbel_argmax {label}", lambda o: o.gumbel_argmax(logits.clone(), streams)
