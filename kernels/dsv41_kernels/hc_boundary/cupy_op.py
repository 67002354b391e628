"""The boundary between two sublayers on a GPU; the contract is dsv41.mhc.hc_boundary's docstring.

Streams, y and x may also be uint16 arrays of bf16 bits, as the released code keeps them. `version`
is one of kernel.cu's; by default v4 where the sizes and the type allow it, else v3.
"""

import cupy
import numpy as np

from dsv41.ops import dense

from ..arrays import on_device, row_tiles, stream_sizes
from ..launch import grid, kernel, processors

PIECE, SUMS, TOKENS = 512, 32, 16  # of hc_coefficients/kernel.cu
ROWS, THREADS = 4, 256  # of kernel.cu
TILE, RING, STAGES = 16, 6, 2  # of one_pass.cuh
THIN_WARPS, THIN_BLOCKS, WORDS = 9, 2, 10  # of one_pass.cuh: blocks are those of an SM
UNIT_BYTES = 4 * 3 * 3 * 32 * 16  # of a unit of fn in shared memory, split into bf16
PLACES, RECORD, PENDING = 16 * (24 + 2), 24 + 4, 16  # of one_pass.cuh, in numbers
VERSIONS = ("v1", "v2", "v3", "v4")
NAMES = ("streams", "y", "pre", "post", "comb", "fn", "base", "scale", "norm")


def hc_boundary(
    streams, y, pre, post, comb, fn, base, scale, norm, config, numerics, fp8=False, version=None
):
    old, new = (streams, y, pre, post, comb), (fn, base, scale, norm)
    out, launches = prepare(old, new, config, numerics, fp8, version)
    for run, blocks, threads, arguments, shared in launches:
        run(blocks, threads, arguments, shared_mem=shared)
    return out


def prepare(old, new, config, numerics, fp8=False, version=None):
    """-> the results' arrays, and the launches that fill them: (kernel, blocks, threads, arguments,
    bytes of shared memory) each.
    """
    old, new = _checked(old, new)
    tokens, s, width = old[0].shape
    best = fastest(old[0], numerics)
    version = version or best
    if version not in VERSIONS:
        raise ValueError(f"version: expected one of {', '.join(VERSIONS)}, got {version!r}")
    if version == "v4" and best != "v4":
        raise ValueError(f"version: v4 needs bf16 numbers and 4 streams of 64 n, got {(s, width)}")
    if fp8 and width % 32:
        raise ValueError(f"streams: MXFP8 needs a multiple of 32 channels, got {width}")
    kind, record = old[0].dtype, width + width // 32
    x = cupy.empty((tokens, record), cupy.uint8) if fp8 else cupy.empty((tokens, width), kind)
    mixing = tuple(cupy.empty_like(part) for part in old[2:])
    out = cupy.empty_like(old[0]), x, *mixing
    macros = {"S": s, "ROUND": int(numerics.bf16), "BF16_STORED": int(kind == np.uint16)}
    plan = _VERSIONS[version]
    return out, plan(old, new, out, config, macros, int(fp8)) if tokens else []


def _checked(old, new):
    """The arrays of `hc_boundary`, in C order, or an error that names the wrong one."""
    tokens, s, width = stream_sizes(old[0])
    mix, kind = s * (s + 2), "uint16" if old[0].dtype == np.uint16 else "float32"
    kinds = kind, kind, *["float32"] * 7
    shapes = [(tokens, s, width), (tokens, width), (tokens, s), (tokens, s), (tokens, s, s)]
    shapes += [(mix, s * width), (mix,), (3,), (width,)]
    arrays = *old, dense(new[0]), *new[1:]
    checked = [on_device(*each) for each in zip(NAMES, arrays, shapes, kinds, strict=True)]
    return tuple(checked[:5]), tuple(checked[5:])


def fastest(streams, numerics):
    """v4 needs four streams of bf16 numbers, however stored, and a width that it can cut."""
    _, s, width = streams.shape
    bf16, cut = numerics.bf16 or streams.dtype == np.uint16, units(width)
    fits = s == 4 and cut is not None and cut[1] <= processors()
    return "v4" if fits and bf16 else "v3"


def small(streams):
    """Does v4 take these rows with one block for every unit and group of tokens, all at once?"""
    tokens, _, width = streams.shape
    return units(width) is not None and -(-tokens // group(width)) <= groups(width)


def group(width):
    """Tokens of a block of `thin`."""
    return 8 * min(max(width // 256, 1), 8)


def groups(width):
    """Of tokens, in the largest launch of `thin`."""
    return THIN_BLOCKS * processors() // (width // 32)


def units(width):
    """(units of 32 channels in a half, halves, an even number) of v4, or None."""
    for count in (5, 4, 3, 2, 1):
        if width % (64 * count) == 0:
            return count, width // (32 * count)
    return None


def _settings(config):
    eps = np.float32(config.rms_norm_eps), np.float32(config.hc_eps)
    return (np.int32(config.hc_sinkhorn_iters), *eps)


def _update(old, out, macros):
    streams, y, _, post, comb = old
    tokens, _, width = streams.shape
    tiles, threads = row_tiles(width)
    arguments = (streams, y, post, comb, out[0], np.int32(tiles), np.int32(width))
    return kernel("hc_update", "hc_update", **macros), (tokens * tiles,), (threads,), arguments, 0


def _v1(old, new, out, config, macros, fp8):
    """A kernel a step."""
    (fn, base, scale, norm), (streams, x, *mixing) = new, out
    tokens, s, width = streams.shape
    pieces = -(-s * width // PIECE)
    sums = cupy.empty((tokens, pieces, SUMS), cupy.float32)
    collapsed = cupy.empty((tokens, width), streams.dtype)
    tiles, threads = row_tiles(width)
    count, long, row = np.int64(tokens), np.int32(s * width), np.int32(width)

    dots = (streams, fn, sums, count, long)
    sets = (sums, base, scale, *mixing, count, np.int32(pieces), long, *_settings(config))
    read = (streams, old[2], collapsed, np.int32(tiles), row)
    normalised = (collapsed, norm, x, row, np.float32(config.rms_norm_eps))

    def step(op, name, blocks, threads, arguments, **more):
        return kernel(op, name, **macros, **more), blocks, (threads,), arguments, 0

    pair = (-(-tokens // TOKENS), pieces)
    return [
        _update(old, out, macros),
        step("hc_coefficients", "mixing_sums", pair, 128, dots),
        step("hc_coefficients", "coefficients", pair[:1], 128, sets),
        step("hc_collapse", "hc_collapse", (tokens * tiles,), threads, read),
        step("hc_boundary", "normalise", (tokens,), THREADS, normalised, FP8=fp8),
    ]


def _rows_launch(name, arguments, streams, config, macros, fp8):
    tokens, _, width = streams.shape
    shared = 4 * (THREADS // 32 * ROWS * SUMS + ROWS * SUMS + ROWS * (SUMS + 1))
    shared += ROWS * width * streams.dtype.itemsize
    run = kernel("hc_boundary", name, shared=shared, FP8=fp8, **macros)
    arguments = (*arguments, np.int64(tokens), np.int32(width), *_settings(config))
    return run, grid(tokens, ROWS), (THREADS,), arguments, shared


def _v2(old, new, out, config, macros, fp8):
    """Update, then one kernel that reads the new streams once."""
    arguments = (out[0], *old[2:], *new, *out[1:])
    enter = _rows_launch("enter", arguments, out[0], config, macros, fp8)
    return [_update(old, out, macros), enter]


def _v3(old, new, out, config, macros, fp8):
    """One pass, a block a few rows."""
    return [_rows_launch("boundary", (*old, *new, *out), out[0], config, macros, fp8)]


def _v4(old, new, out, config, macros, fp8):
    """One pass, cut along the channels; the launch's size chooses who shares fn."""
    tokens, _, width = out[0].shape
    count, halves = units(width)
    macros = macros | {"FP8": fp8, "UNITS": count, "HALVES": halves}
    launch = _thin if small(out[0]) else _wide
    return [launch((*old, *new, *out), tokens, count, halves, config, macros)]


def _thin(arguments, tokens, count, halves, config, macros):
    width = 32 * count * halves
    scratch = inbox(groups(width), 2 * group(width) * (width // 32 * WORDS + 2))
    arguments = (*arguments, *scratch, np.int64(tokens), *_settings(config))
    run = kernel("hc_boundary", "thin", **macros)
    return run, (-(-tokens // group(width)) * width // 32,), (32 * THIN_WARPS,), arguments, 0


def _wide(arguments, tokens, count, halves, config, macros):
    sets, tiles = sets_of(arguments[0]), -(-tokens // TILE)
    teams = min(-(-tiles // sets), processors() // halves)
    desk = count * (STAGES * 5 * 16 * 32 * arguments[0].itemsize + 4 * PLACES)
    desk += 4 * (2 * 16 * RECORD + 4 * 16 + PENDING * 16) + 7 * 8 + 8
    shared = count * (UNIT_BYTES + 4 * 32) + sets * desk
    scratch = inbox(processors() // halves * sets, RING * halves * PLACES)
    arguments = (*arguments, *scratch, np.int64(tokens), *_settings(config))
    run = kernel("hc_boundary", "wide", shared=shared, **macros)
    return run, (teams * halves,), (32 * sets * (count + 1),), arguments, shared


def sets_of(streams):
    """Sets of warps of a block of `wide`: as many as have room for their stages."""
    return 2 if streams.dtype == np.uint16 else 1


_VERSIONS = dict(zip(VERSIONS, (_v1, _v2, _v3, _v4), strict=True))
_inboxes = {}


def inbox(walkers, words):
    """Words and epochs of launches, each with another tag, so nobody clears them; arrays a device,
    stream and cut. trap: a stream's first call makes them; no graph may be recording it.
    """
    key = cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr, walkers, words
    if key not in _inboxes:
        arrays = cupy.zeros(walkers * words, cupy.uint64), cupy.zeros(2 * walkers, cupy.uint32)
        _inboxes[key] = arrays
    return _inboxes[key]
