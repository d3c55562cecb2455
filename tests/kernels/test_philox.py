"""The noise is Philox4x32-10, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from distributions import assert_follows

from kvhive.kernels.philox import GUMBEL_RANGE, NoiseStream, gumbel_noise, gumbel_noise_at, philox4x32

CPU = torch.device("cpu")
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        0x299F31D0A4093822,
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def philox(counter, key):
    words = philox4x32(
        [torch.tensor(word) for word in counter], (torch.tensor(key & 0xFFFFFFFF), torch.tensor(key >> 32))
    )
    return [int(word) for word in words]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_passes_the_known_answers_of_random123(counter, key, expected):
    assert philox(counter, key) == expected


@pytest.mark.parametrize("vocab_size", [1, 5, 97])
def test_noise_is_a_function_of_seed_choice_position_and_token(vocab_size):
    """Recomputed token by token, from the definition, in Python's own floats."""
    streams = [NoiseStream(2**63 + 5, 3, 77), NoiseStream(1, 2**32 - 1, 2**32 - 1)]
    noise = gumbel_noise(vocab_size, streams, CPU)
    for row, (seed, choice, position) in enumerate(streams):
        for token in range(vocab_size):
            word = philox([token >> 2, position, choice, 0], seed)[token & 3]
            expected = -math.log(-math.log(((word >> 9) + 0.5) * 2**-23))
            assert math.isclose(noise[row, token], expected, rel_tol=1e-5, abs_tol=1e-6)


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for():
    streams = [NoiseStream(3, 0, 9), NoiseStream(2**64 - 1, 1, 10)]
    every = gumbel_noise(400, streams, CPU)
    tokens, rows = torch.tensor([0, 3, 399, 4, 4, 6]), torch.tensor([0, 1, 1, 0, 1, 0])
    assert torch.equal(gumbel_noise_at(tokens, rows, streams), every[rows, tokens])
    assert torch.equal(gumbel_noise(123, streams[1:], CPU), every[1:, :123])


def test_noise_is_always_finite_and_within_its_range():
    """The extremes of 23 bits; GUMBEL_RANGE is what decides which tokens get no noise at all."""
    extremes = [-math.log(-math.log((bits + 0.5) * 2**-23)) for bits in (0, 2**23 - 1)]
    assert extremes[1] - extremes[0] < GUMBEL_RANGE < extremes[1] - extremes[0] + 0.02
    noise = gumbel_noise(200_000, [NoiseStream(1, 1, 1)], CPU)
    assert torch.isfinite(noise).all()
    assert noise.max() - noise.min() < GUMBEL_RANGE


@pytest.mark.parametrize("part", ["seed", "choice", "position"])
def test_streams_that_differ_in_one_part_are_independent(part):
    """Two streams pick among 4 tokens; the pairs they pick are uniform over 16."""
    streams = [NoiseStream(seed=7, choice=0, position=index) for index in range(4000)]
    others = [stream._replace(**{part: 1_000_000 + index}) for index, stream in enumerate(streams)]
    first, second = (gumbel_noise(4, drawn, CPU).argmax(dim=-1) for drawn in (streams, others))
    assert_follows((4 * first + second).tolist(), torch.full((16,), 1 / 16))


def test_what_does_not_fit_is_refused():
    for stream, message in [
        (NoiseStream(2**64, 0, 0), "seed: needs 64 bits"),
        (NoiseStream(-1, 0, 0), "seed: needs 64 bits"),
        (NoiseStream(0, 2**32, 0), "choice: needs 32 bits"),
        (NoiseStream(0, 0, 2**32), "position: needs 32 bits"),
    ]:
        with pytest.raises(ValueError, match=message):
            gumbel_noise(8, [stream], CPU)
