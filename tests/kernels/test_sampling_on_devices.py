"""Where a look at results costs a wait, nobody looks before the tokens are there; and they are the same."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvhive.kernels import sampling
from kvhive.kernels.penalties import PenaltyRow
from kvhive.kernels.philox import NoiseStream
from kvhive.kernels.sampling import SamplingRow, sample
from kvhive.kernels.token_filters import TokenFilters

VOCABULARY = 300


class Looks(TorchDispatchMode):
    """Counts the calls whose result's shape or value the host has to know."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"):
            self.seen.append(name)
        if name in ("index", "index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1]):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def random_rows(count):
    rng, rows = random.Random(3), []
    for number in range(count):
        filters = TokenFilters(
            top_k=rng.choice((0, 0, 1, 40, VOCABULARY + 5)),
            top_p=rng.choice((1.0, 0.5, 0.95)),
            min_p=rng.choice((0.0, 0.02)),
            typical_p=rng.choice((1.0, 1.0, 0.7)),
        )
        penalties = PenaltyRow(forbidden=frozenset({3, 5})) if rng.random() < 0.3 else None
        stream = NoiseStream(rng.getrandbits(64), 0, number)
        rows.append(SamplingRow(rng.choice((0.0, 0.7, 2.0)), filters, penalties, stream))
    return rows


@pytest.fixture
def as_on_a_device(monkeypatch):
    monkeypatch.setattr(sampling, "_looks_are_free", lambda device: False)


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    logits, rows = torch.randn(60, VOCABULARY) * 2, random_rows(60)
    logits[7, 11], logits[8], logits[9, 3] = torch.nan, -torch.inf, torch.inf
    logits[10, 4:] = -torch.inf
    return logits, rows, sample(logits, rows)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("probe", [1, 7, VOCABULARY, 1024])
def test_the_tokens_are_the_same_however_few_are_sorted_at_first(case, probe, monkeypatch):
    logits, rows, expected = case
    monkeypatch.setattr(sampling, "_DEVICE_PROBE", probe)
    assert sample(logits, rows) == expected
    assert expected[7:10] == [None, None, None]


@pytest.mark.usefixtures("as_on_a_device")
def test_nobody_looks_before_the_end(case):
    logits, rows, _ = case
    with Looks() as looks:
        sample(logits, rows)
    assert looks.seen == []


def test_the_test_would_notice(case):
    logits, rows, _ = case
    with Looks() as looks:
        sample(logits, rows)
    assert looks.seen != []
