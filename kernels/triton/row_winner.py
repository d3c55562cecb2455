"""The largest element of each row, alone or with noise, in two stages over parts of the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PART = 4096
"""Tokens of one program of the first stage."""


@triton.jit
def _winner(scores: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the largest of [n] scores, NaN if there is one, and the lowest index of the largest number."""
    # A comparison with NaN is never true: a reduction alone would lose it, or not, by its order.
    broken = tl.max((scores != scores).to(tl.int32), 0) > 0
    largest, index = tl.max(tl.where(scores != scores, -float("inf"), scores), 0, return_indices=True)
    return tl.where(broken, float("nan"), largest), index


@triton.jit(do_not_specialize=["vocab_size", "parts"])
def greedy_part_kernel(
    logits_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    token_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    parts: tl.tensor,
    PART: tl.constexpr,
) -> None:
    """Find the winner of one part of one row. Grid: (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    logits = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=-float("inf"))
    largest, index = _winner(logits.to(tl.float32))
    tl.store(largest_ptr + row * parts + tl.program_id(1), largest)
    tl.store(token_ptr + row * parts + tl.program_id(1), tl.program_id(1) * PART + index)


@triton.jit(do_not_specialize=["vocab_size", "parts"])
def gumbel_part_kernel(
    scores_ptr: tl.tensor,
    streams_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    token_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    parts: tl.tensor,
    PART: tl.constexpr,
) -> None:
    """Find the winner of one part of one row, its noise added. Grid: (rows, parts).

    streams: [rows, 4] int64: low and high word of the seed, choice, position; see kernels/philox.py. They are
    read from memory, so that a captured launch draws anew each time.
    """
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(streams_ptr + row * 4).to(tl.uint32)
    high = tl.load(streams_ptr + row * 4 + 1).to(tl.uint32)
    choice = tl.load(streams_ptr + row * 4 + 2).to(tl.uint32)
    position = tl.load(streams_ptr + row * 4 + 3).to(tl.uint32)
    # Four neighbours share a counter: the words of a quarter as many counters, side by side.
    counter = tl.program_id(1) * (PART // 4) + tl.arange(0, PART // 4)
    zero = counter.to(tl.uint32) * 0
    w0, w1, w2, w3 = tl.philox_impl(counter.to(tl.uint32), zero + position, zero + choice, zero, low, high)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    uniform = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    noise = -tl.log(-tl.log(uniform))
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    scores = tl.load(scores_ptr + row * row_stride + token, mask=token < vocab_size, other=-float("inf"))
    largest, index = _winner(scores + noise.to(scores.dtype))
    tl.store(largest_ptr + row * parts + tl.program_id(1), largest)
    tl.store(token_ptr + row * parts + tl.program_id(1), tl.program_id(1) * PART + index)


@triton.jit(do_not_specialize=["parts"])
def winner_of_parts_kernel(
    part_largest_ptr: tl.tensor,
    part_token_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    token_ptr: tl.tensor,
    parts: tl.tensor,
    PARTS: tl.constexpr,
) -> None:
    """Find the winner of a row among its parts' winners. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    scores = tl.load(part_largest_ptr + row * parts + part, mask=part < parts, other=-float("inf"))
    largest, index = _winner(scores)
    tl.store(largest_ptr + row, largest.to(largest_ptr.dtype.element_ty))
    tl.store(token_ptr + row, tl.load(part_token_ptr + row * parts + index).to(tl.int64))


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See Operators.greedy; logits are of at most 32 bits."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab_size = logits.shape
    parts = triton.cdiv(vocab_size, _PART)
    largest = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    if rows:
        greedy_part_kernel[(rows, parts)](
            logits, largest, token, logits.stride(0), vocab_size, parts, PART=_PART, num_warps=4
        )
    return _winner_of_parts(largest, token, logits.dtype)


def gumbel_argmax(scores: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """See Operators.gumbel_argmax; streams: [rows, 4] int64, as kernels/philox.py's stream_words has them.

    Nothing of the streams is known to the host, so a captured call draws what they say at each replay.
    """
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    rows, vocab_size = scores.shape
    parts = triton.cdiv(vocab_size, _PART)
    largest = torch.empty(rows, parts, dtype=scores.dtype, device=scores.device)
    token = torch.empty(rows, parts, dtype=torch.int32, device=scores.device)
    if rows:
        gumbel_part_kernel[(rows, parts)](
            scores, streams, largest, token, scores.stride(0), vocab_size, parts, PART=_PART, num_warps=4
        )
    return _winner_of_parts(largest, token, scores.dtype)[1]


def _winner_of_parts(
    part_largest: torch.Tensor, part_token: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, parts = part_largest.shape
    largest = torch.empty(rows, dtype=dtype, device=part_largest.device)
    token = torch.empty(rows, dtype=torch.int64, device=part_largest.device)
    if rows:
        winner_of_parts_kernel[(rows,)](
            part_largest,
            part_token,
            largest,
            token,
            parts,
            PARTS=triton.next_power_of_2(parts),
            num_warps=1,
        )
    return largest, token
