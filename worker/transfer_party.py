"""What both directions of transfer know of the worker that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from kvhive.proto.config import TransferConfig
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.block_desk import BlockDesk
from kvhive.worker.transfer_identity import TransferIdentity
from kvhive.worker.transfer_maker import ChannelMaker


@dataclass(frozen=True, slots=True)
class Emulation:
    """For measurements and tests: a network slower than there is. Zeros: as it is."""

    bytes_per_s: float = 0.0
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Party:
    """One worker, as its transfers see it."""

    worker_id: str
    epoch: Callable[[], int]
    pool: torch.Tensor
    """[blocks, ...], contiguous."""
    identity: TransferIdentity
    desk: BlockDesk
    maker: ChannelMaker
    config: TransferConfig
    threads: Executor
    emulation: Emulation


def wire_identity(identity: TransferIdentity) -> worker_pb2.BlockIdentity:
    """Return an identity as the wire carries it."""
    return worker_pb2.BlockIdentity(
        model=identity.model,
        namespace=identity.namespace,
        kv_dtype=identity.kv_dtype,
        layout=identity.layout,
        block_size=identity.block_size,
        tp=identity.tp,
    )


def read_identity(wire: worker_pb2.BlockIdentity) -> TransferIdentity:
    """Undo wire_identity."""
    return TransferIdentity(wire.model, wire.namespace, wire.kv_dtype, wire.layout, wire.block_size, wire.tp)
