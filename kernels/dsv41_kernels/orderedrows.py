"""The launches that choose from rows of scores of any length (topk_ordered.cuh)."""

import functools

import cupy
import numpy as np

from .launch import kernel, launch

PER_THREAD, MOST_LISTED, MOST_PARTS = 16, 20480, 256  # as in topk_ordered.cuh
SHORT = PER_THREAD * 1024  # scores that one block of threads keeps in registers
SPAN = PER_THREAD * 512  # scores that a block of a long row looks at at once
MOST_CHOSEN = 4096  # from longer rows
BLOCKS = 264  # two on each of the 132 SMs of a Hopper


def choose_rows(scores, visible, k, per=1, parts=None, settlers=1024):
    """The k best of each row (T, N) f32, of the first ceil(visible / per) -> (T, k) int64.

    k is at most MOST_CHOSEN where rows are longer than SHORT.
    """
    rows, count = scores.shape
    if count <= SHORT:
        return choose_short(scores, visible, k, per)
    parts, length = split(rows, count, parts)
    if parts == 1:
        return choose_long(scores, visible, k, per)
    return choose_in_parts(scores, visible, k, per, parts, length, settlers)


def choose_short(scores, visible, k, per=1, **macros):
    """One launch, rows in registers."""
    rows, count = scores.shape
    chosen = cupy.empty((rows, k), np.int64)
    run = kernel("index_topk", "short_v3", shared=8 * SHORT, **macros)
    sizes = np.int64(count), np.int32(per), np.int32(k)
    block = threads(count, macros.get("PER_THREAD", PER_THREAD))
    launch(run, rows if k else 0, block, (scores, visible, chosen, *sizes), 8 * count)
    return chosen


def choose_long(scores, visible, k, per=1):
    """One launch, each row by one block of threads."""
    rows, count = scores.shape
    chosen, size = cupy.empty((rows, k), np.int64), SPAN + k
    run = kernel("index_topk", "long_v3", shared=8 * (SPAN + MOST_CHOSEN))
    sizes = np.int64(count), *map(np.int32, (per, k, rank(k, count), size))
    launch(run, rows if k else 0, 512, (scores, visible, chosen, *sizes), 8 * size)
    return chosen


def choose_in_parts(scores, visible, k, per, parts, length, settlers=1024):
    """Two launches, each row by `parts` blocks and one more, of `settlers` threads."""
    rows, count = scores.shape
    size, limit = SPAN + k, max(2 * k, 512)
    chosen = cupy.empty((rows, k), np.int64)
    found = cupy.empty((rows, parts, limit), np.uint64)
    counts = cupy.empty((rows, parts), np.uint32)
    run = kernel("index_topk", "filter_v3", shared=8 * (SPAN + MOST_CHOSEN))
    sizes = np.int64(count), *map(np.int32, (per, k, rank(k, count), length, limit, size))
    blocks = (parts, rows if k else 0)
    launch(run, blocks, 512, (scores, visible, found, counts, *sizes), 8 * size)
    run = kernel("index_topk", "settle_v3", shared=8 * MOST_LISTED)
    arrays = scores, visible, found, counts, chosen
    sizes = *sizes[:3], np.int32(parts), np.int32(limit)
    launch(run, rows if k else 0, settlers, (*arrays, *sizes), 8 * MOST_LISTED)
    return chosen


def rank(k, count):
    """How many of a sample of SPAN scores surely reach what the k-th best of all reaches: the share
    that is to be expected, six deviations and some more.
    """
    share = k * SPAN / count
    return int(share + 6 * share**0.5 + 8)


def threads(count, per_thread=PER_THREAD):
    """More for longer rows, in whole warps: half of the scores of a thread, as far as that goes."""
    return min(SHORT // per_thread, max(64, 32 * -(-count // (16 * per_thread))))


@functools.cache
def split(rows, count, parts=None):
    """-> how many blocks share a row, and their scores: little work for the busiest SM.

    In units of the time in which all SMs read SPAN scores for each of BLOCKS blocks, 2 us; a block
    needs about 1.5 to start and to find its bound, the second launch 2. What is chosen does not
    depend on the parts.
    """
    spans = -(-count // SPAN)
    most = 1 if rows > 4 * BLOCKS else min(spans, MOST_PARTS)
    some = {max(1, min(most, waves * BLOCKS // max(1, rows))) for waves in (1, 2, 3, 4)}

    def time(n):
        return -(-rows * n // BLOCKS) * (-(-spans // n) + 1.5) + (2 if n > 1 else 0)

    best = parts or min(sorted({1} | some), key=time)
    length = -(-spans // best) * SPAN
    return -(-count // length), length
