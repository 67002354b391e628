"""The clamped gate on a GPU; the contract is dsv41.ops.swiglu's docstring."""

import cupy
import numpy as np

from ..launch import grid, kernel


def swiglu(gate, up, limit):
    gate, up = cupy.ascontiguousarray(gate, np.float32), cupy.ascontiguousarray(up, np.float32)
    out = cupy.empty_like(gate)
    if out.size:
        arguments = gate, up, out, np.int64(out.size), np.float32(limit or 0)
        kernel("swiglu", "swiglu")(grid(out.size), (256,), arguments)
    return out
