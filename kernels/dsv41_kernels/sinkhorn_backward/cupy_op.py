"""Sinkhorn's gradient on a GPU; the contract is dsv41.train.mhc.sinkhorn_backward's docstring."""

import cupy
import numpy as np

from ..launch import THREADS, grid, kernel


def sinkhorn_backward(dcomb, logits, iterations, eps):
    dcomb, logits = (cupy.ascontiguousarray(x, cupy.float32) for x in (dcomb, logits))
    out, size = cupy.empty_like(logits), logits.shape[-1]
    count = logits.size // (size * size)
    if count:
        run = kernel("sinkhorn_backward", "sinkhorn_backward", S=size, PASSES=2 * iterations - 1)
        run(grid(count), (THREADS,), (dcomb, logits, out, np.int64(count), np.float32(eps)))
    return out
