"""The gradient of the gate on a GPU; the contract is dsv41.train.ops.swiglu_backward."""

import cupy
import numpy as np

from ..launch import grid, kernel


def swiglu_backward(dy, gate, up, limit):
    dy, gate, up = (cupy.ascontiguousarray(a, np.float32) for a in (dy, gate, up))
    dgate, dup = cupy.empty_like(gate), cupy.empty_like(gate)
    if dy.size:
        arguments = dy, gate, up, dgate, dup, np.int64(dy.size), np.float32(limit or 0)
        kernel("swiglu_backward", "swiglu_backward")(grid(dy.size), (256,), arguments)
    return dgate, dup
