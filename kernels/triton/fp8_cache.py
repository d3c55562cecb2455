"""Keys and values on their way into a pool and out of it, which may hold them in eight bits.

Devices convert them in one instruction for two numbers, from compute capability 8.9 on.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_stored(x: tl.tensor, pool_ptr: tl.tensor) -> tl.tensor:
    """Return x in the pool's type. What eight bits cannot hold becomes the largest that they can."""
    if pool_ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(pool_ptr.dtype.element_ty)
