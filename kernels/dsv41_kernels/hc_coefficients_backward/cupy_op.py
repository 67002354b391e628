"""The gradient of the mixing coefficients on a GPU, dsv41.train.mhc.hc_coefficients_backward."""

import cupy
import numpy as np

from dsv41.ops import dense

from ..arrays import on_device, stream_sizes
from ..hc_coefficients.cupy_op import SUMS, mixing_sums
from ..launch import grid, kernel

TOKENS, SPAN = 32, 128  # as in kernel.cu


def hc_coefficients_backward(dpre, dpost, dcomb, streams, fn, base, scale, config, numerics):
    tokens, s, width = stream_sizes(streams)
    mix = s * (s + 2)
    streams = on_device("streams", streams, (tokens, s, width))
    fn = on_device("fn", dense(fn), (mix, s * width))
    given = [("dpre", dpre, (tokens, s)), ("dpost", dpost, (tokens, s))]
    given += [("dcomb", dcomb, (tokens, s, s)), ("base", base, (mix,)), ("scale", scale, (3,))]
    dm, small = _through_sets(streams, fn, [on_device(*each) for each in given], config)
    dstreams, parts = _stream_gradients(streams, fn, dm)
    small = _sum_parts(small, (SUMS,))
    return dstreams, _sum_parts(parts, fn.shape), small[:mix], small[mix : mix + 3]


def _through_sets(streams, fn, given, config):
    """-> dm (T, SUMS) of every token; gradients of base and scale, (blocks, SUMS) to be added."""
    (tokens, s, width), sums = streams.shape, mixing_sums(streams, fn)
    dm = cupy.empty((tokens, SUMS), cupy.float32)
    small = cupy.empty((grid(tokens, TOKENS)[0], SUMS), cupy.float32)
    if tokens:
        sizes = np.int64(tokens), np.int32(sums.shape[1]), np.int32(s * width)
        settings = np.float32(config.rms_norm_eps), np.float32(config.hc_eps)
        passes = 2 * config.hc_sinkhorn_iters - 1
        run = kernel("hc_coefficients_backward", "through_sets", S=s, PASSES=passes)
        run(grid(tokens, TOKENS), (128,), (sums, *given, dm, small, *sizes, *settings))
    return dm, small


def _stream_gradients(streams, fn, dm):
    """-> dstreams (T, S, D), and parts (spans, MIX, S*D) of dfn."""
    tokens, s, width = streams.shape
    (spans,), dstreams = grid(tokens, SPAN), cupy.empty_like(streams)
    parts = cupy.empty((spans, *fn.shape), cupy.float32)
    if tokens:
        run = kernel("hc_coefficients_backward", "stream_gradients", S=s, PASSES=1)
        arguments = (streams, fn, dm, dstreams, parts, np.int64(tokens), np.int32(s * width))
        run((*grid(s * width, 128), spans), (128,), arguments)
    return dstreams, parts


def _sum_parts(parts, shape):
    """parts (rows, ...) -> their sum over the rows, in `shape`; zeros without rows."""
    out = cupy.empty(shape, cupy.float32)
    run = kernel("hc_coefficients_backward", "sum_parts", S=1, PASSES=1)
    run(grid(out.size, 32), (256,), (parts, out, np.int32(len(parts)), np.int64(out.size)))
    return out
