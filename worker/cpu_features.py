"""What this machine's CPU computes fast."""

from __future__ import annotations

import functools
from pathlib import Path

_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""As Linux names them: Intel and AMD, Intel's matrix units, Arm."""


@functools.cache
def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bfloat16 numbers itself; on one that does not, float32 is faster."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False  # no Linux, or a sandbox without /proc: float32 is right everywhere
    named = (line.partition(":") for line in lines)
    found = (value.split() for name, _, value in named if name.strip().lower() in ("flags", "features"))
    return any(_BFLOAT16_FLAGS.intersection(flags) for flags in found)
