"""Counter-based random numbers: the noise of a token is a function of (seed, position, token id) alone.

No generator state exists, so a preempted, migrated or re-batched request draws the same numbers. Source:
Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x32-10, Random123).
"""

from __future__ import annotations

import torch

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_WORDS = 4


def philox4x32(counter: torch.Tensor, key: int) -> torch.Tensor:
    """Return Philox4x32-10 of each counter under a 64-bit key.

    counter: [..., 4] int64 holding 32-bit words. Returns the same shape and kind.
    Raises ValueError when the key is not 64-bit or the counter is not int64 in fours.

    Products of two words may wrap int64; their bits are the right ones, and the masks keep just those.
    """
    if not 0 <= key < 1 << 64:
        raise ValueError(f"key: needs 64 bits, is {key}")
    if counter.dtype != torch.int64 or counter.shape[-1:] != (_WORDS,):
        raise ValueError(f"counter: needs [..., 4] int64, is {tuple(counter.shape)} {counter.dtype}")
    low, high = key & _MASK, key >> 32
    c0, c1, c2, c3 = counter.unbind(-1)
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _MASK) ^ c1 ^ low,
            product_1 & _MASK,
            ((product_0 >> 32) & _MASK) ^ c3 ^ high,
            product_0 & _MASK,
        )
        low, high = (low + _WEYL_0) & _MASK, (high + _WEYL_1) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def gumbel_noise(token_ids: torch.Tensor, seed: int, position: int) -> torch.Tensor:
    """Return standard Gumbel noise for each token id at one position: [n] float64.

    token_ids: [n] int64, ascending

    key = seed (64-bit), counter = (token_id >> 2, position, 0, 0), word = token_id & 3,
    u = ((word >> 9) + 0.5) * 2⁻²³, which is never 0 or 1, noise = -log(-log u). A token's noise does not
    depend on which others are asked for.
    Raises ValueError when the seed does not fit 64 bits or the position 32.
    """
    if not 0 <= position <= _MASK:
        raise ValueError(f"position: needs 32 bits, is {position}")
    # Four neighbours share a counter, which is computed once.
    blocks, block_of_token = torch.unique_consecutive(token_ids >> 2, return_inverse=True)
    counter = blocks.new_zeros(blocks.shape[0], _WORDS)
    counter[:, 0] = blocks
    counter[:, 1] = position
    words = philox4x32(counter, seed)[block_of_token, token_ids & 3]
    uniform = ((words >> 9).double() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
