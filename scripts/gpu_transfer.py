"""Are blocks moved right from one pool of a device to another one: gathered, sent, received and scattered?

Both ends are in this process and speak gloo, as two workers of one GPU do: staging buffers, streams, pinned
memory and the block-copy kernels are those of a real pull. NCCL needs a second GPU and is not tried here.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from kvhive.kernels.fp8_cache import FP8
from kvhive.proto.block_hash import BlockHash
from kvhive.worker.transfer_cargo import Cargo
from kvhive.worker.transfer_channel import RECEIVER, SENDER, Channel
from kvhive.worker.transfer_maker import ChannelMaker
from kvhive.worker.transfer_pace import Pace

TIMEOUT_S = 60.0


def check_transfer(device: torch.device, dry: bool) -> list[dict[str, Any]]:
    """Move scattered chains; every byte must come to its place and no other may change. One row per dtype."""
    sender, receiver = _channel_pair(device)
    blocks, shape = (24, (2, 2, 2, 16, 8)) if dry else (256, (32, 2, 8, 16, 128))
    rows = []
    try:
        for dtype in (torch.float32, torch.bfloat16, FP8):
            pools = [_pool(2 * blocks, shape, dtype, device, seed) for seed in (1, 2)]
            places = [_places(blocks, seed) for seed in (1, 2)]
            expected = pools[1].clone()
            expected[places[1]] = pools[0][places[0]]
            took = _move(sender, receiver, pools, places)
            gigabytes = blocks * pools[0].shape[1] / 1e9
            rows.append(
                {
                    "case": f"transfer {dtype}".replace("torch.", ""),
                    "gb_s": gigabytes / took,
                    "right": torch.equal(pools[1], expected),
                }
            )
    finally:
        receiver.close()
        sender.close()
    return rows


def _move(sender: Channel, receiver: Channel, pools: list[torch.Tensor], places: list[list[int]]) -> float:
    """Return the seconds that it took."""
    chunk = max(1, len(places[0]) // 5)  # several, of which the last one is smaller
    hashes = [BlockHash(index.to_bytes(32, "little")) for index in range(len(places[0]))]
    cargoes = [Cargo(bytes(16), hashes, side, chunk) for side in places]
    began = time.perf_counter()

    def pace() -> Pace:
        return Pace(time.monotonic() + TIMEOUT_S, TIMEOUT_S)

    thread = threading.Thread(target=sender.send, args=(pools[0], cargoes[0], pace()))
    thread.start()
    receiver.receive(pools[1], cargoes[1], pace(), lambda count: None)
    thread.join()
    return time.perf_counter() - began


def _channel_pair(device: torch.device) -> tuple[Channel, Channel]:
    maker = ChannelMaker("127.0.0.1", device, "gloo")
    plan = maker.plan("check")
    made: list[Channel] = []
    thread = threading.Thread(target=lambda: made.append(maker.make(plan, SENDER, TIMEOUT_S)))
    thread.start()
    receiver = maker.make(plan, RECEIVER, TIMEOUT_S)
    thread.join()
    return made[0], receiver


def _pool(
    blocks: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int
) -> torch.Tensor:
    """Return random bytes that stand for numbers, `[blocks, bytes]`."""
    generator = torch.Generator(device).manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (blocks, nbytes), dtype=torch.uint8, device=device, generator=generator)


def _places(blocks: int, seed: int) -> list[int]:
    """Return places of which no two lie side by side."""
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
    return [2 * place for place in order.tolist()]
