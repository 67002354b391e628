"""The gradient of RMSNorm on a GPU; the contract is dsv41.train.ops.rmsnorm_backward."""

import cupy
import numpy as np

from dsv41.train.ops import rmsnorm_backward as definition

from ..launch import kernel

ROWS, MOST_CHANNELS = 64, 1024


def rmsnorm_backward(dy, x, weight, eps):
    channels = x.shape[-1]
    rows = x.size // max(channels, 1)
    if not rows or channels > MOST_CHANNELS or x.dtype != np.float32:
        return definition.definition(dy, x, weight, eps)
    dy, x, weight = (cupy.ascontiguousarray(a, np.float32) for a in (dy, x, weight))
    dx, blocks = cupy.empty_like(x), -(-rows // ROWS)
    partial = cupy.empty((blocks, channels), np.float32)
    run = kernel("rmsnorm_backward", "rmsnorm_backward", ROWS=ROWS, CHUNKS=-(-channels // 32))
    arguments = np.int64(rows), np.int32(channels), np.float32(eps)
    run((blocks,), (256,), (dy, x, weight, dx, partial, *arguments))
    return dx, partial.sum(axis=0)
