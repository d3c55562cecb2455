"""The noise is Philox4x32-10, to the bit."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from kvhive.kernels.philox import gumbel_noise, philox4x32

KNOWN_ANSWERS = [
    ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        0x299F31D0A4093822,
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_passes_the_known_answers_of_random123(counter, key, expected):
    assert philox4x32(torch.tensor(counter), key).tolist() == expected


@pytest.mark.parametrize("vocab_size", [1, 5, 97])
def test_noise_is_a_function_of_seed_position_and_token(vocab_size):
    """Recomputed token by token, from the definition, in Python's own floats."""
    noise = gumbel_noise(torch.arange(vocab_size), 2**63 + 5, 77)
    for token in range(vocab_size):
        word = philox4x32(torch.tensor([token >> 2, 77, 0, 0]), 2**63 + 5).tolist()[token & 3]
        uniform = ((word >> 9) + 0.5) * 2**-23
        assert math.isclose(noise[token].item(), -math.log(-math.log(uniform)), rel_tol=1e-12)


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for():
    every = gumbel_noise(torch.arange(400), 3, 9)
    some = torch.tensor([0, 3, 4, 6, 7, 99, 396, 399])
    assert torch.equal(gumbel_noise(some, 3, 9), every[some])


def test_noise_is_always_finite():
    for word in (0, 0xFFFFFFFF):
        uniform = ((word >> 9) + 0.5) * 2**-23
        assert 0 < uniform < 1
        assert numpy.float32(uniform) < 1
    assert torch.isfinite(gumbel_noise(torch.arange(200_000), 1, 1)).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="64 bits"):
        gumbel_noise(torch.arange(8), 2**64, 0)
    with pytest.raises(ValueError, match="64 bits"):
        gumbel_noise(torch.arange(8), -1, 0)
    with pytest.raises(ValueError, match="32 bits"):
        gumbel_noise(torch.arange(8), 0, 2**32)
