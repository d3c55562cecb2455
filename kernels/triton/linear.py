"""A linear layer whose rows are summed in one order, whatever their number.

The inputs are cut into pieces of a fixed size. A piece is summed from its beginning to its end, and pieces
are added in order: one after the other in one program where there are many rows, or by programs of their own
whose sums a second kernel adds, where few rows would leave most of the device idle. Both round alike, and so
do tiles of 64 and of 128 rows, whose warp groups issue the same instructions on 64 rows each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvhive.kernels.triton import tile_shapes

_PIECE = 1024
"""Inputs of a piece: a layer of 4096 by 4096 is then read by 128 programs at once."""

_FEW_ROWS = 64
"""Up to so many rows, which are one tile, pieces may be summed side by side."""

_ENOUGH_TILES = 264
"""Tiles of outputs that keep a device busy without that: two for each of its 132 multiprocessors."""

_SUM_COLUMNS = 1024


class _Tile(NamedTuple):
    rows: int
    columns: int
    depth: int
    """Inputs at a time; divides _PIECE."""
    warps: int
    stages: int


def _tile(rows: int, dtype: torch.dtype, capability: int) -> _Tile:
    if dtype == torch.float32:
        return _Tile(16, 64, 32, 4, 2)
    columns = 128 if capability >= 90 else 64  # there the operands take registers
    return _Tile(64, columns, 64, 4, 4) if rows <= _FEW_ROWS else _Tile(128, columns, 64, 8, 3)


@triton.jit
def _piece_sum(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    begin: tl.tensor,
    inputs: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PIECE: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Return one piece's products: [ROWS, COLUMNS] float32. x_ptr: [ROWS, 1]; weight_ptr: [COLUMNS, 1]."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    lane = tl.arange(0, DEPTH)[None, :]
    for first in tl.range(begin, tl.minimum(begin + PIECE, inputs), DEPTH):
        if EVEN:
            x, weight = tl.load(x_ptr + first + lane), tl.load(weight_ptr + first + lane)
        else:
            inside = first + lane < inputs
            x = tl.load(x_ptr + first + lane, mask=inside, other=0.0)
            weight = tl.load(weight_ptr + first + lane, mask=inside, other=0.0)
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows", "outputs"])
def linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    output_ptr: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PIECE: tl.constexpr,
    EVEN: tl.constexpr,
    BIASED: tl.constexpr,
    APART: tl.constexpr,
) -> None:
    """Compute one tile of the output. Grid: (tiles of rows, tiles of outputs, pieces where APART else 1).

    Row tiles lie side by side, so that those after the first find the weights in the L2 cache. With APART the
    output is [pieces, rows, outputs] float32, and has no bias yet.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # What lies outside is read from inside, and not written: no mask stands in the way of wide loads.
    x_rows = x_ptr + (row % rows).to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + (column % outputs).to(tl.int64)[:, None] * inputs
    place = row.to(tl.int64)[:, None] * outputs + column[None, :]
    wanted = (row < rows)[:, None] & (column < outputs)[None, :]
    if APART:
        piece = tl.program_id(2)
        total = _piece_sum(x_rows, weight_rows, piece * PIECE, inputs, ROWS, COLUMNS, DEPTH, PIECE, EVEN)
        tl.store(output_ptr + piece.to(tl.int64) * rows * outputs + place, total, mask=wanted)
    else:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in tl.range(0, inputs, PIECE):
            total += _piece_sum(x_rows, weight_rows, begin, inputs, ROWS, COLUMNS, DEPTH, PIECE, EVEN)
        if BIASED:
            total += tl.load(bias_ptr + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
        tl.store(output_ptr + place, total.to(output_ptr.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["outputs", "pieces"])
def piece_total_kernel(
    partial_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    output_ptr: tl.tensor,
    outputs: tl.tensor,
    pieces: tl.tensor,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """Add the pieces of some outputs of one row, as linear_kernel does. Grid: (rows, tiles of outputs)."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < outputs
    place = tl.program_id(0).to(tl.int64) * outputs + column
    distance = tl.num_programs(0).to(tl.int64) * outputs
    total = tl.zeros([COLUMNS], tl.float32)
    for piece in tl.range(0, pieces):
        total += tl.load(partial_ptr + piece * distance + place, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output_ptr + place, total.to(output_ptr.dtype.element_ty), mask=inside)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See kernels/linear.py."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    output = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not output.numel() or not inputs:
        return output.zero_() if bias is None else output.copy_(bias.expand_as(output))
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = _tile(rows, x.dtype, tile_shapes.compute_capability(x.device))
    row_tiles, column_tiles = triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns)
    pieces = triton.cdiv(inputs, _PIECE)
    apart = pieces > 1 and rows <= _FEW_ROWS and column_tiles * row_tiles < _ENOUGH_TILES
    target = output
    if apart:
        target = torch.empty(pieces, rows, outputs, dtype=torch.float32, device=x.device)
    linear_kernel[(row_tiles, column_tiles, pieces if apart else 1)](
        x,
        weight,
        weight if bias is None else bias,
        target,
        rows,
        outputs,
        inputs,
        x.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        PIECE=_PIECE,
        EVEN=inputs % tile.depth == 0,
        BIASED=bias is not None,
        APART=apart,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if apart:
        piece_total_kernel[(rows, triton.cdiv(outputs, _SUM_COLUMNS))](
            target,
            weight if bias is None else bias,
            output,
            outputs,
            pieces,
            COLUMNS=_SUM_COLUMNS,
            BIASED=bias is not None,
            num_warps=4,
        )
    return output
