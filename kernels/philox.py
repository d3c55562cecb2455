"""Counter-based random numbers: the noise of a token is a function of (seed, choice, position, id) alone.

No generator state exists, so a preempted, migrated, speculated or re-batched request draws the same numbers.
Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x32-10, Random123).

key = seed (64-bit), counter = (token_id >> 2, position, choice, 0), word = token_id & 3,
u = ((word >> 9) + 0.5) * 2⁻²³, which is never 0 or 1, noise = -log(-log u).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvhive.kernels.host_values import on_device

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_WORDS = 4

GUMBEL_RANGE = 19.46
"""More than the largest noise less the smallest: a token this far below another one never beats it."""


class NoiseStream(NamedTuple):
    """What the noise of one row is drawn from."""

    seed: int
    """64-bit."""
    choice: int
    """32-bit; which of a request's answers this is."""
    position: int
    """32-bit; index in its sequence of the token to choose."""


def philox4x32(
    counter: Sequence[torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the four words of Philox4x32-10 of each counter under its key.

    counter: four int64 tensors that hold 32-bit words and broadcast with each other and with the key
    key: low and high word, likewise

    Products of two words may wrap int64; their bits are the right ones, and the masks keep just those. The
    low words of products are masked only once they are needed alone, which saves a sixth of the work.
    """
    c0, c1, c2, c3 = counter
    low, high = key
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ c1 ^ low) & _MASK
        c2 = ((product_0 >> 32) ^ c3 ^ high) & _MASK
        c1, c3 = product_1, product_0
        low, high = (low + _WEYL_0) & _MASK, (high + _WEYL_1) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def gumbel_noise(vocab_size: int, streams: Sequence[NoiseStream], device: torch.device) -> torch.Tensor:
    """Return standard Gumbel noise for every token: [len(streams), vocab_size] float32.

    Raises ValueError when a part of a stream does not fit its bits.
    """
    low, high, choice, position = (part[:, None] for part in stream_words(streams, device).T)
    blocks = torch.arange(-(-vocab_size // _WORDS), device=device)[None]
    # Four neighbours share a counter, which is computed once.
    words = philox4x32((blocks, position, choice, torch.zeros_like(position)), (low, high))
    noise = torch.empty(len(streams), blocks.shape[1], _WORDS, device=device)
    for index, word in enumerate(words):
        noise[..., index] = word >> 9
    return _gumbel(noise.flatten(1)[:, :vocab_size])


def gumbel_noise_at(
    token_ids: torch.Tensor, stream_of: torch.Tensor, streams: Sequence[NoiseStream]
) -> torch.Tensor:
    """Return the noise of some tokens, the same as `gumbel_noise` has for them: [n] float32.

    token_ids: [n] int64
    stream_of: [n] int64, indices of `streams`

    Raises ValueError when a part of a stream does not fit its bits.
    """
    low, high, choice, position = (part[stream_of] for part in stream_words(streams, token_ids.device).T)
    counter = (token_ids >> 2, position, choice, torch.zeros_like(token_ids))
    words = torch.stack(philox4x32(counter, (low, high)))
    return _gumbel((words.gather(0, (token_ids & 3)[None])[0] >> 9).float())


def stream_words(streams: Sequence[NoiseStream], device: torch.device) -> torch.Tensor:
    """Return low and high word of the seed, choice and position: [len(streams), 4] int64.

    Raises ValueError when a part of a stream does not fit its bits.
    """
    for seed, choice, position in streams:
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed: needs 64 bits, is {seed}")
        if not 0 <= choice <= _MASK:
            raise ValueError(f"choice: needs 32 bits, is {choice}")
        if not 0 <= position <= _MASK:
            raise ValueError(f"position: needs 32 bits, is {position}")
    parts = [(seed & _MASK, seed >> 32, choice, position) for seed, choice, position in streams]
    return on_device(parts, torch.int64, device).reshape(-1, 4)


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Noise of 23-bit integers, in place; every step before the logarithms is exact in float32."""
    return bits.add_(0.5).mul_(2.0**-23).log_().neg_().log_().neg_()
