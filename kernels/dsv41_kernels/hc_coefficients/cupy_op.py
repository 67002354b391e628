"""Mixing coefficients on a GPU; the contract is dsv41.mhc.hc_coefficients' docstring."""

import cupy
import numpy as np

from dsv41.ops import dense

from ..arrays import on_device, stream_sizes
from ..launch import grid, kernel, launch, processors

PIECE, SUMS, TOKENS = 512, 32, 16  # as in kernel.cu
WIDE, TURN = 1024, 24  # v2: columns of a piece; tokens that the 6 warps of a block take at a time


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


def mixing_sums(streams, fn, version=None):
    """streams (T, S, D), fn (2S + S*S, S*D) -> (T, pieces, 32): dot products, x . x, zeros."""
    tokens, s, width = stream_sizes(streams)
    x = on_device("streams", streams, (tokens, s, width))
    fn = on_device("fn", dense(fn), (s * (s + 2), s * width))
    version = version or ("v1" if s * width % 4 else "v2")  # by the width, which no batch changes
    pieces = -(-s * width // (PIECE if version == "v1" else WIDE))
    sums = cupy.empty((tokens, pieces, SUMS), cupy.float32)
    if tokens:
        arguments = (x, fn, sums, np.int64(tokens), np.int32(s * width))
        (_launch_v1 if version == "v1" else _launch_v2)(s, tokens, pieces, arguments)
    return sums


def _launch_v1(s, tokens, pieces, arguments):
    run = kernel("hc_coefficients", "mixing_sums", S=s)
    launch(run, (*grid(tokens, TOKENS), pieces), 128, arguments)


def _launch_v2(s, tokens, pieces, arguments):
    """As many blocks as stay on the GPU, two an SM; how tokens are shared out changes no bits."""
    blocks = max(1, 2 * processors() // pieces)
    span = TURN * -(-tokens // (TURN * blocks))
    shared = 4 * s * (s + 2) * WIDE
    run = kernel("hc_coefficients", "mixing_sums_v2", shared=shared, S=s)
    blocks = (*grid(tokens, span), pieces)
    launch(run, blocks, 192, (*arguments, np.int32(span)), shared)
