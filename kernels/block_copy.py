"""Whole blocks out of a pool, into a pool, and from place to place: for transfer between workers."""

from __future__ import annotations

import torch

from kvhive.kernels.fp8_cache import FP8
from kvhive.kernels.operators import operators_for


def gather_blocks(pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Copy blocks of the pool side by side: out[i] = pool[blocks[i]].

    pool:    [pool blocks, ...], contiguous
    blocks:  [n] int64 on the pool's device, inside the pool (looking would cost a device sync)
    out:     [n, ...], contiguous, of the pool's dtype and block shape

    Raises ValueError when shapes or dtypes do not fit.
    """
    _check(pool, blocks)
    if out.shape != (blocks.shape[0], *pool.shape[1:]) or out.dtype != pool.dtype or not out.is_contiguous():
        raise ValueError(f"out: needs {(blocks.shape[0], *pool.shape[1:])} {pool.dtype}, is {out.shape}")
    operators_for(pool).gather_blocks(_plain(pool), blocks, _plain(out))


def scatter_blocks(staging: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor) -> None:
    """Copy blocks to their places in the pool: pool[blocks[i]] = staging[i].

    Shapes and errors are gather_blocks'; `blocks` must be distinct.
    """
    _check(pool, blocks)
    expected = (blocks.shape[0], *pool.shape[1:])
    if staging.shape != expected or staging.dtype != pool.dtype or not staging.is_contiguous():
        raise ValueError(f"staging: needs {expected} {pool.dtype}, is {tuple(staging.shape)} {staging.dtype}")
    operators_for(pool).scatter_blocks(_plain(staging), blocks, _plain(pool))


def copy_blocks(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy blocks inside the pool: pool[targets[i]] = pool[sources[i]].

    sources, targets: [n] int64 on the pool's device, inside the pool; targets are distinct and no sources.
    Raises ValueError when shapes do not fit.
    """
    _check(pool, sources)
    _check(pool, targets)
    if sources.shape != targets.shape:
        raise ValueError(f"targets: needs {tuple(sources.shape)}, is {tuple(targets.shape)}")
    operators_for(pool).copy_blocks(_plain(pool), sources, targets)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """View numbers of eight bits, of which torch knows little, as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _check(pool: torch.Tensor, blocks: torch.Tensor) -> None:
    if not pool.is_contiguous():
        raise ValueError(f"pool: needs to be contiguous, has strides {pool.stride()}")
    if blocks.dim() != 1 or blocks.dtype != torch.int64:
        raise ValueError(f"blocks: needs int64 [n], is {blocks.dtype} {tuple(blocks.shape)}")
