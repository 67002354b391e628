"""Mixing coefficients on a GPU; the contract is dsv41.mhc.hc_coefficients' docstring."""

import cupy
import numpy as np

from dsv41.ops import dense

from ..arrays import on_device, stream_sizes
from ..launch import grid, kernel

PIECE, SUMS, TOKENS = 512, 32, 16  # as in kernel.cu


def hc_coefficients(streams, fn, base, scale, config, numerics):
    tokens, s, width = stream_sizes(streams)
    base, scale = on_device("base", base, (s * (s + 2),)), on_device("scale", scale, (3,))
    sums = mixing_sums(streams, fn)
    shapes = (tokens, s), (tokens, s), (tokens, s, s)
    pre, post, comb = (cupy.empty(shape, cupy.float32) for shape in shapes)
    if tokens:
        sizes = np.int64(tokens), np.int32(sums.shape[1]), np.int32(s * width)
        settings = np.int32(config.hc_sinkhorn_iters), np.float32(config.rms_norm_eps)
        arguments = (sums, base, scale, pre, post, comb, *sizes, *settings)
        run = kernel("hc_coefficients", "coefficients", S=s)
        run(grid(tokens, TOKENS), (128,), (*arguments, np.float32(config.hc_eps)))
    return pre, post, comb


def mixing_sums(streams, fn):
    """streams (T, S, D), fn (2S + S*S, S*D) -> (T, pieces, 32): dot products, x . x, zeros."""
    tokens, s, width = stream_sizes(streams)
    x = on_device("streams", streams, (tokens, s, width))
    fn = on_device("fn", dense(fn), (s * (s + 2), s * width))
    pieces = -(-s * width // PIECE)
    sums = cupy.empty((tokens, pieces, SUMS), cupy.float32)
    if tokens:
        arguments = (x, fn, sums, np.int64(tokens), np.int32(s * width))
        run = kernel("hc_coefficients", "mixing_sums", S=s)
        run((-(-tokens // TOKENS), pieces), (128,), arguments)
    return sums
