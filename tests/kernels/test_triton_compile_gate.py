"""The gate compiles without a GPU, and refuses what it says it refuses."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys

import pytest

from kvhive.scripts.compile_gate import Report, cases

FINE = Report("prefill_kernel", "prefill", 90, 200, 0, 0, 227 << 10, 24, True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton brings its compiler for x86-64 only")
def test_kernels_are_compiled_for_both_architectures():
    """Even where the environment asks for the interpreter, as the other tests of kernels do."""
    result = subprocess.run(
        [sys.executable, "-P", "-m", "kvhive.scripts.compile_gate", "--only", "activation", "--jobs", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "4 kernels compiled, 0 with a fault"
    assert {line.split()[2] for line in result.stdout.splitlines()[1:-1]} == {"sm_80", "sm_90"}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"stack": 8}, "spills"),
        ({"local": 8}, "spills"),
        ({"shared": (227 << 10) + 1}, "too much shared memory"),
        ({"architecture": 80, "wgmma": 0}, "too much shared memory"),
        ({"wgmma": 0}, "no wgmma"),
        ({"wgmma": 0, "needs_wgmma": False}, ""),
        ({"stack": 8, "wgmma": 0}, "spills, no wgmma"),
    ],
)
def test_what_is_refused(change, fault):
    assert dataclasses.replace(FINE, **change).fault == fault


def test_every_case_has_a_name_of_its_own():
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) > 20
