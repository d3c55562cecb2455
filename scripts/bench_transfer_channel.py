"""How fast a chain moves between two processes, beside plain torch.distributed with the same bytes.

This process receives and a child sends, from pool to pool and under seals, as between workers on CPUs; once
more over gloo, as where one of them is on a GPU. The plain side sends one tensor, contiguous on both sides;
where blocks do not lie in a row, another one does the same job with torch alone: collects the blocks by
indexing, sends and receives one tensor, puts them in place. They take turns, and a ratio is a median over the
rounds, each of a round's own figures. Each process has half of the cores: left to itself a scheduler that is
busy puts both on one, and then whoever costs more of the processor is slower by that, however much of it
could have been done at once.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from kvhive.proto.block_hash import BlockHash
from kvhive.proto.config import TransferConfig
from kvhive.scripts.used_pool import LEAST_POOL, used_places
from kvhive.worker.transfer_cargo import Cargo
from kvhive.worker.transfer_channel import RECEIVER, SENDER, Channel, ChannelPlan
from kvhive.worker.transfer_maker import ChannelMaker
from kvhive.worker.transfer_pace import Pace

TIMEOUT_S = 120.0
CHUNK_BYTES = TransferConfig().chunk_mib * 2**20
NONCE = bytes(16)
ROUND_BYTES = 64 * 2**20
"""Of a smaller chain a round is as many turns as move this much: one of them is over in milliseconds."""
_POOLED = 4
"""Chains of a size that its pool has room for."""


class Placed(StrEnum):
    """How a chain lies in either pool."""

    ROW = "in a row"
    """As a fresh pool gives it."""
    USED = "used"
    """As a pool gives it in which others have come and gone (used_pool.py)."""
    SCATTERED = "scattered"
    """No two blocks side by side: the worst that there can be."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A chain to move."""

    block_bytes: int
    chain_bytes: int
    placed: Placed = Placed.ROW

    @property
    def blocks(self) -> int:
        """Blocks of the chain."""
        return self.chain_bytes // self.block_bytes

    @property
    def pool_blocks(self) -> int:
        """Blocks of the pool that it lies in."""
        return max(_POOLED * self.blocks, LEAST_POOL)

    @property
    def turns(self) -> int:
        """Turns of a round."""
        return max(1, ROUND_BYTES // self.chain_bytes)


def measure(cells: list[Cell], rounds: int) -> list[dict[str, Any]]:
    """Return each cell's medians."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: huge pages, as workers have them
    maker = ChannelMaker("127.0.0.1", torch.device("cpu"))
    key = secrets.token_hex(8)
    plans = {"chain": maker.plan(key), "gloo": replace(maker.plan(f"{key}-gloo"), backend="gloo")}
    context = multiprocessing.get_context("spawn")
    told, theirs = context.Pipe()
    child = context.Process(target=_sender, args=(plans, theirs), daemon=True)
    child.start()
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        _take_half(RECEIVER)
        channels = {name: maker.make(plan, RECEIVER, TIMEOUT_S) for name, plan in plans.items()}
        _join(plans["chain"], RECEIVER)
        return [_measure(cell, rounds, channels, told) for cell in cells]
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        told.close()
        child.kill()
        child.join(10)
        if dist.is_initialized():
            dist.destroy_process_group()


def _measure(cell: Cell, rounds: int, channels: dict[str, Channel], told: Connection) -> dict[str, Any]:
    moves = _moves(cell, channels, receive_side=True)
    seconds: dict[str, list[float]] = {name: [] for name in moves}
    for number in range(rounds * cell.turns + 1):  # the first one warms up
        names = deque(moves)
        names.rotate(number)  # nobody is always the one who finds what another one has left in the caches
        for name in names:
            told.send((name, cell))
            assert told.recv() == "ready"
            began = time.perf_counter()
            moves[name]()
            if number:
                seconds[name].append(time.perf_counter() - began)
    ratios = {
        name: statistics.median(p / c for p, c in zip(seconds[name], seconds["chain"], strict=True))
        for name in moves
    }
    return {
        "block_bytes": cell.block_bytes,
        "chain_bytes": cell.chain_bytes,
        "placed": cell.placed,
        "plain_gb_s": cell.chain_bytes / statistics.median(seconds["plain"]) / 1e9,
        "chain_gb_s": cell.chain_bytes / statistics.median(seconds["chain"]) / 1e9,
        "gloo_gb_s": cell.chain_bytes / statistics.median(seconds["gloo"]) / 1e9,
        "transfer_ratio": ratios["plain"],
        "same_job_ratio": ratios.get("same job", ratios["plain"]),
        "best_ratio": min(seconds["plain"]) / min(seconds["chain"]),
    }


def _sender(plans: dict[str, ChannelPlan], told: Connection) -> None:
    """The child: does what it is told until the pipe is closed."""
    _take_half(SENDER)
    maker = ChannelMaker("127.0.0.1", torch.device("cpu"))
    channels = {name: maker.make(plan, SENDER, TIMEOUT_S) for name, plan in plans.items()}
    _join(plans["chain"], SENDER)
    prepared: Cell | None = None
    moves: dict[str, Callable[[], None]] = {}
    while True:
        try:
            name, cell = told.recv()
        except EOFError:
            return
        if cell != prepared:
            prepared, moves = cell, _moves(cell, channels, receive_side=False)
        told.send("ready")
        moves[name]()


def _moves(cell: Cell, channels: dict[str, Channel], receive_side: bool) -> dict[str, Callable[[], None]]:
    """Return what this side does, by name. What a chain needs in a row has no job beside the plain one."""
    moves = {"plain": _plain(cell, receive_side)}
    moves |= {name: _chain(cell, channel, receive_side) for name, channel in channels.items()}
    return {**moves, "same job": _same_job(cell, receive_side)} if cell.placed != Placed.ROW else moves


def _take_half(rank: int) -> None:
    """Give this process its side's cores, or the only one."""
    cores = sorted(os.sched_getaffinity(0))
    own = cores[rank::2] or cores
    os.sched_setaffinity(0, own)
    torch.set_num_threads(len(own))


def _join(plan: ChannelPlan, rank: int) -> None:
    """Make the default group, which only this measurement has."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host, _, port = plan.store.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=dist.PrefixStore("plain", store), rank=rank, world_size=2)


def _plain(cell: Cell, receive_side: bool) -> Callable[[], None]:
    tensor = torch.ones(cell.blocks * cell.block_bytes, dtype=torch.uint8)

    def plain() -> None:
        if receive_side:
            dist.recv(tensor, SENDER)
        else:
            dist.send(tensor, RECEIVER)

    return plain


def _same_job(cell: Cell, receive_side: bool) -> Callable[[], None]:
    pool = _pool(cell).fill_(1).view(torch.int64)  # bytes are what torch copies slowest
    places = torch.tensor(_places(cell, int(receive_side)))
    moved = torch.ones(cell.blocks, cell.block_bytes // 8, dtype=torch.int64)

    def same_job() -> None:
        if receive_side:
            dist.recv(moved, SENDER)
            pool.index_copy_(0, places, moved)
        else:
            torch.index_select(pool, 0, places, out=moved)
            dist.send(moved, RECEIVER)

    return same_job


def _chain(cell: Cell, channel: Channel, receive_side: bool) -> Callable[[], None]:
    pool = _pool(cell)
    pool.fill_(1)  # its pages are there
    hashes = [BlockHash(index.to_bytes(32, "little")) for index in range(cell.blocks)]
    chunk = max(1, CHUNK_BYTES // cell.block_bytes)
    cargo = Cargo(NONCE, hashes, _places(cell, int(receive_side)), chunk)
    pace = Pace(math.inf, TIMEOUT_S)

    def chain() -> None:
        if receive_side:
            channel.receive(pool, cargo, pace, lambda count: None)
        else:
            channel.send(pool, cargo, pace)

    return chain


def _places(cell: Cell, seed: int) -> list[int]:
    """Return where one side's blocks lie, in `_pool`."""
    if cell.placed == Placed.ROW:
        return list(range(cell.blocks))
    if cell.placed == Placed.USED:
        return used_places(cell.blocks, cell.pool_blocks, seed)
    order = torch.randperm(cell.blocks, generator=torch.Generator().manual_seed(seed))
    return [2 * place for place in order.tolist()]


def _pool(cell: Cell) -> torch.Tensor:
    return torch.empty(cell.pool_blocks, cell.block_bytes, dtype=torch.uint8)
