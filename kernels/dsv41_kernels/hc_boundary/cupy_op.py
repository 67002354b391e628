"""The boundary between two sublayers on a GPU; the contract is dsv41.mhc.hc_boundary's docstring.

Streams, y and x may also be uint16 arrays of bf16 bits, as the released code keeps them. `version`
is one of kernel.cu's; by default the fastest one that exists for the sizes and the type.
"""

import functools

import cupy
import numpy as np

from dsv41.ops import dense

from ..arrays import on_device, row_tiles, stream_sizes
from ..launch import grid, kernel

PIECE, SUMS, TOKENS = 512, 32, 16  # of hc_coefficients/kernel.cu
ROWS, THREADS = 4, 256  # of kernel.cu
GROUP, RING, WARPS, WIDE_WARPS = 64, 5, 8, 12  # of one_pass.cuh
VERSIONS = ("v1", "v2", "v3", "v4")


def hc_boundary(
    streams, y, pre, post, comb, fn, base, scale, norm, config, numerics, fp8=False, version=None
):
    tokens, s, width = stream_sizes(streams)
    kind = "uint16" if streams.dtype == np.uint16 else "float32"
    version = version or fastest(streams, numerics)
    if version not in VERSIONS:
        raise ValueError(f"version: expected one of {', '.join(VERSIONS)}, got {version!r}")
    if fp8 and width % 32:
        raise ValueError(f"streams: MXFP8 needs a multiple of 32 channels, got {width}")
    mix = s * (s + 2)
    old = (
        on_device("streams", streams, (tokens, s, width), kind),
        on_device("y", y, (tokens, width), kind),
    )
    old += on_device("pre", pre, (tokens, s)), on_device("post", post, (tokens, s))
    old += (on_device("comb", comb, (tokens, s, s)),)
    new = on_device("fn", dense(fn), (mix, s * width)), on_device("base", base, (mix,))
    new += on_device("scale", scale, (3,)), on_device("norm", norm, (width,))
    x_shape, x_type = ((tokens, width + width // 32), "uint8") if fp8 else ((tokens, width), kind)
    out = cupy.empty((tokens, s, width), kind), cupy.empty(x_shape, x_type)
    out += tuple(cupy.empty(shape, cupy.float32) for shape in (pre.shape, post.shape, comb.shape))
    if tokens:
        macros = {"S": s, "ROUND": int(numerics.bf16), "BF16_STORED": int(kind == "uint16")}
        _VERSIONS[version](old, new, out, config, macros, fp8)
    return out


def fastest(streams, numerics):
    """v4 needs four streams of bf16 numbers, however stored, and a width that it can cut."""
    _, s, width = streams.shape
    bf16 = numerics.bf16 or streams.dtype == np.uint16
    return (
        "v4" if s == 4 and bf16 and units(width) and units(width)[1] // 2 <= processors() else "v3"
    )


def units(width):
    """(units of 32 channels in a half, halves, an even number) of v4, or None."""
    for count in (5, 4, 3, 2, 1):
        if width % (64 * count) == 0:
            return count, width // (32 * count)
    return None


@functools.cache
def processors():
    """Streaming multiprocessors of the current GPU."""
    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["multiProcessorCount"]


def _settings(config):
    eps = np.float32(config.rms_norm_eps), np.float32(config.hc_eps)
    return (np.int32(config.hc_sinkhorn_iters), *eps)


def _update(old, out, macros):
    streams, y, _, post, comb = old
    tokens, _, width = streams.shape
    tiles, threads = row_tiles(width)
    arguments = (streams, y, post, comb, out[0], np.int32(tiles), np.int32(width))
    kernel("hc_update", "hc_update", **macros)((tokens * tiles,), (threads,), arguments)


def _v1(old, new, out, config, macros, fp8):
    """A kernel a step."""
    pre, (fn, base, scale, norm) = old[2], new
    streams, x, *mixing = out
    tokens, s, width = streams.shape
    _update(old, out, macros)
    pieces = -(-s * width // PIECE)
    sums = cupy.empty((tokens, pieces, SUMS), cupy.float32)
    arguments = (streams, fn, sums, np.int64(tokens), np.int32(s * width))
    blocks = (-(-tokens // TOKENS), pieces)
    kernel("hc_coefficients", "mixing_sums", **macros)(blocks, (128,), arguments)
    sizes = np.int64(tokens), np.int32(pieces), np.int32(s * width)
    arguments = (sums, base, scale, *mixing, *sizes, *_settings(config))
    kernel("hc_coefficients", "coefficients", **macros)(grid(tokens, TOKENS), (128,), arguments)
    tiles, threads = row_tiles(width)
    collapsed = cupy.empty((tokens, width), streams.dtype)
    arguments = (streams, pre, collapsed, np.int32(tiles), np.int32(width))
    kernel("hc_collapse", "hc_collapse", **macros)((tokens * tiles,), (threads,), arguments)
    arguments = (collapsed, norm, x, np.int32(width), np.float32(config.rms_norm_eps))
    run = kernel("hc_boundary", "normalise", FP8=int(fp8), **macros)
    run((tokens,), (THREADS,), arguments)


def _rows_launch(name, arguments, streams, config, macros, fp8):
    tokens, _, width = streams.shape
    shared = 4 * (THREADS // 32 * ROWS * SUMS + ROWS * SUMS + ROWS * (SUMS + 1))
    shared += ROWS * width * streams.dtype.itemsize
    run = kernel("hc_boundary", name, shared=shared, FP8=int(fp8), **macros)
    arguments = (*arguments, np.int64(tokens), np.int32(width), *_settings(config))
    run(grid(tokens, ROWS), (THREADS,), arguments, shared_mem=shared)


def _v2(old, new, out, config, macros, fp8):
    """Update, then one kernel that reads the new streams once."""
    _update(old, out, macros)
    _rows_launch("enter", (out[0], *old[2:], *new, *out[1:]), out[0], config, macros, fp8)


def _v3(old, new, out, config, macros, fp8):
    """One pass, a block a few rows."""
    _rows_launch("boundary", (*old, *new, *out), out[0], config, macros, fp8)


def _v4(old, new, out, config, macros, fp8):
    """One pass, cut along the channels; the launch's size chooses who shares fn."""
    tokens, _, width = out[0].shape
    count, halves = units(width)
    macros = macros | {"FP8": int(fp8), "UNITS": count, "HALVES": halves}
    arguments = (*old, *new, *out)
    if -(-tokens // 16) * halves <= processors():
        _thin(arguments, tokens, config, macros)
    else:
        _wide(arguments, tokens, config, macros)


def _thin(arguments, tokens, config, macros):
    count, halves = macros["UNITS"], macros["HALVES"]
    tiles = -(-tokens // 16)
    sums = cupy.empty((tiles, halves, 16, SUMS + 1), cupy.float32)  # a number more: the squares
    squares = sums.ravel()[tiles * halves * 16 * SUMS :]
    shared = 4 * (count * 16 * (SUMS + 1) + 16 + 16)
    arguments = (*arguments, sums, squares, counters(tiles), np.int64(tokens), *_settings(config))
    run = kernel("hc_boundary", "thin", shared=shared, arch="sm_90a", **macros)
    run((tiles * halves,), (32 * (count + 1),), arguments, shared_mem=shared)


def _wide(arguments, tokens, config, macros):
    count, halves = macros["UNITS"], macros["HALVES"]
    groups, slices = -(-tokens // GROUP), halves // 2
    teams = min(groups, processors() // slices)
    sums = cupy.empty((teams, RING, halves, GROUP, SUMS + 1), cupy.float32)
    squares = sums.ravel()[teams * RING * halves * GROUP * SUMS :]
    collapsed = cupy.empty((teams * slices, 2, WARPS, count, 2, 32, 4), cupy.uint32)
    fragments = 2 * count * 4 * 3 * 3 * 32 * 16
    shared = fragments + 4 * (2 * GROUP + 4 * 16 + 4)
    scratch = sums, squares, collapsed, counters(groups)
    arguments = (*arguments, *scratch, np.int64(tokens), *_settings(config))
    run = kernel("hc_boundary", "wide", shared=shared, arch="sm_90a", **macros)
    run((teams * slices,), (32 * WIDE_WARPS,), arguments, shared_mem=shared)


_VERSIONS = dict(zip(VERSIONS, (_v1, _v2, _v3, _v4), strict=True))
_counters = {}


def counters(groups):
    """Two zeros a group, which every launch leaves as zeros again; an array a device and stream."""
    key = cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr
    if key not in _counters or len(_counters[key]) < 2 * groups:
        _counters[key] = cupy.zeros(max(4 * groups, 1024), cupy.uint32)
    return _counters[key]
