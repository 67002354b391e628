"""Sinkhorn on a GPU; the contract is dsv41.mhc.sinkhorn's docstring."""

import cupy
import numpy as np

from ..launch import THREADS, grid, kernel


def sinkhorn(logits, iterations, eps):
    logits = cupy.ascontiguousarray(logits, cupy.float32)
    out, size = cupy.empty_like(logits), logits.shape[-1]
    count = logits.size // (size * size)
    if count:
        run = kernel("sinkhorn", "sinkhorn", S=size)
        arguments = (logits, out, np.int64(count), np.int32(iterations), np.float32(eps))
        run(grid(count), (THREADS,), arguments)
    return out
