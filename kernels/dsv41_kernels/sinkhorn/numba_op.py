"""Sinkhorn in Numba CUDA; the contract is dsv41.mhc.sinkhorn's docstring.

One thread holds one S x S matrix, as in kernel.cu, and changes 2 S factors instead of S * S
numbers: with k = softmax + eps the matrix is row[i] k[i, j] column[j] after every pass. Also runs
in Numba's simulator (NUMBA_ENABLE_CUDASIM=1), where a thread is plain Python.
"""

import functools
import math

import numpy as np
from numba import config, cuda, float32

from ..launch import grid

THREADS = 128


def sinkhorn(logits, iterations, eps):
    if not (config.ENABLE_CUDASIM or hasattr(logits, "__cuda_array_interface__")):
        raise TypeError(f"logits: expected a CUDA array, got {type(logits).__name__}")
    if logits.dtype != np.float32 or logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"logits: expected float32 (..., S, S), got {logits.dtype} {logits.shape}")
    size = logits.shape[-1]
    out = np.zeros(logits.shape, np.float32, like=logits)
    count = logits.size // max(1, size * size)
    if count:
        matrices = logits.reshape(count, size, size)
        run = sinkhorn_kernel(size)[grid(count, THREADS), THREADS, _stream(logits)]
        run(matrices, out.reshape(count, size, size), iterations, np.float32(eps))
    return out


def _stream(like):
    """CuPy's current stream, so that both libraries keep one order; 0 in the simulator."""
    if config.ENABLE_CUDASIM:
        return 0
    import cupy

    return cuda.external_stream(cupy.cuda.get_current_stream().ptr)


@functools.cache
def sinkhorn_kernel(size):
    """The kernel for matrices of `size` rows, which the compiler has to know."""

    @cuda.jit
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
