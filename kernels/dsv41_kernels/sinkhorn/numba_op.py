"""Sinkhorn in Numba CUDA; the contract is dsv41.mhc.sinkhorn's docstring.

One thread holds one S x S matrix, as in kernel.cu, and changes 2 S factors instead of S * S
numbers: with k = softmax + eps the matrix is row[i] k[i, j] column[j] after every pass. Also runs
in Numba's simulator (NUMBA_ENABLE_CUDASIM=1), where a thread is plain Python.
"""

import functools
import math

import numpy as np
from numba import cuda, float32

from ..launch import grid, numba_launch
from ..numba_records import check

THREADS = 128


def sinkhorn(logits, iterations, eps):
    logits = check("logits", logits, np.dtype(np.float32))
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"logits: expected shape (..., S, S), got {logits.shape}")
    size, out = logits.shape[-1], np.zeros(logits.shape, np.float32, like=logits)
    count = logits.size // max(1, size * size)
    if count:
        matrices = (count, size, size)
        arrays = logits.reshape(matrices), out.reshape(matrices)
        arguments = (*arrays, np.int64(iterations), np.float32(eps))
        numba_launch(sinkhorn_kernel(size), grid(count, THREADS), THREADS, arguments)
    return out


@functools.cache
def sinkhorn_kernel(size):
    """The kernel for matrices of `size` rows, which the compiler has to know."""

    @cuda.jit(fastmath=True)  # divisions by the approximate reciprocal, as in kernel.cu
    def run(logits, out, iterations, eps):
        at = cuda.grid(1)
        if at >= logits.shape[0]:
            return
        k = cuda.local.array((size, size), float32)
        row = cuda.local.array(size, float32)
        column = cuda.local.array(size, float32)
        for i in range(size):
            top, total = logits[at, i, 0], float32(0)
            for j in range(size):
                top = max(top, logits[at, i, j])
            for j in range(size):
                k[i, j] = math.exp(logits[at, i, j] - top)
                total += k[i, j]
            for j in range(size):
                k[i, j] = k[i, j] / total + eps
            row[i] = column[i] = float32(1)
        for n in range(max(iterations, 1)):
            for i in range(size if n else 0):  # the softmax was the first row pass
                total = float32(0)
                for j in range(size):
                    total += k[i, j] * column[j]
                row[i] /= row[i] * total + eps
            for j in range(size):
                total = float32(0)
                for i in range(size):
                    total += row[i] * k[i, j]
                column[j] /= column[j] * total + eps
        for i in range(size):
            for j in range(size):
                out[at, i, j] = row[i] * k[i, j] * column[j]

    return run
