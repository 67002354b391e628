"""The launches that choose from rows of scores of any length (topk_ordered.cuh, topk_held.cuh)."""

import functools

import cupy
import numpy as np

from .launch import kernel, launch, processors

PER_THREAD, MOST_LISTED, MOST_PARTS = 16, 20480, 256  # as in topk_ordered.cuh
SHORT = PER_THREAD * 1024  # scores that one block of threads keeps in registers
SPAN = PER_THREAD * 512  # scores that a block of a long row looks at at once
MOST_CHOSEN = 4096  # from longer rows
LONG_PART = 16  # spans of a block from which on a single wave of blocks is slow


def choose_rows(scores, visible, k, per=1, parts=None, version="v4"):
    """The k best of each row (T, N) f32, of the first ceil(visible / per) -> (T, k) int64.

    k is at most MOST_CHOSEN where rows are longer than SHORT.
    """
    rows, count = scores.shape
    if count <= SHORT:
        return choose_short(scores, visible, k, per, version)
    parts, length = split(rows, count, parts)
    if parts == 1:
        return choose_long(scores, visible, k, per)
    return choose_in_parts(scores, visible, k, per, parts, length, version)


def choose_short(scores, visible, k, per=1, version="v4"):
    """One launch, rows in registers."""
    rows, count = scores.shape
    chosen = cupy.empty((rows, k), np.int64)
    shared = 8 * SHORT if version == "v3" else 0
    arguments = scores, visible, chosen, np.int64(count), np.int32(per), np.int32(k)
    run = kernel("index_topk", f"short_{version}", shared=shared)
    launch(run, rows if k else 0, threads(count), arguments, shared and 8 * count)
    return chosen


def choose_long(scores, visible, k, per=1):
    """One launch, each row by one block of threads."""
    rows, count = scores.shape
    chosen, size = cupy.empty((rows, k), np.int64), SPAN + k
    run = kernel("index_topk", "long_v3", shared=8 * (SPAN + MOST_CHOSEN))
    sizes = np.int64(count), *map(np.int32, (per, k, rank(k, count), size))
    launch(run, rows if k else 0, 512, (scores, visible, chosen, *sizes), 8 * size)
    return chosen


def choose_in_parts(scores, visible, k, per, parts, length, version="v4"):
    """Each row by `parts` blocks, of which the last to finish settles the row; in v3, and where
    there are more blocks than SMs, a second launch settles.
    """
    rows, count = scores.shape
    size, limit = SPAN + k, max(2 * k, 512)
    chosen = cupy.empty((rows, k), np.int64)
    found = cupy.empty((rows, parts, limit), np.uint64)
    counts = cupy.empty((rows, parts), np.uint32)
    sizes = np.int64(count), *map(np.int32, (per, k, rank(k, count), length, limit, size))
    blocks, most = (parts, rows if k else 0), 8 * (SPAN + MOST_CHOSEN)
    if version == "v4" and rows * parts <= processors():
        run = kernel("index_topk", "parts_v4", shared=most)
        arrays = scores, visible, found, counts, arrivals(), chosen
        launch(run, blocks, 512, (*arrays, *sizes), 8 * size)
        return chosen
    run = kernel("index_topk", "filter_v3", shared=most)
    launch(run, blocks, 512, (scores, visible, found, counts, *sizes), 8 * size)
    run = kernel("index_topk", f"settle_{version}", shared=8 * MOST_LISTED)
    arrays = scores, visible, found, counts, chosen
    sizes = *sizes[:3], np.int32(parts), np.int32(limit)
    launch(run, rows if k else 0, 1024, (*arrays, *sizes), 8 * MOST_LISTED)
    return chosen


_arrivals = {}


def arrivals():
    """Counters for rows, 0 between launches, as each launch brings them back there; an array a
    device and stream. trap: a stream's first call makes it; no graph may be recording that call.
    """
    key = cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr
    if key not in _arrivals:
        _arrivals[key] = cupy.zeros(processors(), np.uint32)
    return _arrivals[key]


def rank(k, count):
    """How many of a sample of SPAN scores surely reach what the k-th best of all reaches: the share
    that is to be expected, five deviations and some more.
    """
    share = k * SPAN / count
    return int(share + 5 * share**0.5 + 6)


def threads(count):
    """More for longer rows, in whole warps: half of the scores of a thread, as far as that goes."""
    return min(1024, max(64, 32 * -(-count // (16 * PER_THREAD))))


@functools.cache
def split(rows, count, parts=None):
    """-> how many blocks share a row, and their scores: little work for the busiest SM, which holds
    two blocks. What is chosen does not depend on the parts.

    In units of the time in which all SMs read SPAN scores for each of their blocks; a block needs
    three quarters of one to start and to find its bound, the second launch one. A single wave of
    long blocks takes a third more than that, probably since they start, read and end in step.
    """
    spans, blocks = -(-count // SPAN), 2 * processors()
    most = 1 if rows > 4 * blocks else min(spans, MOST_PARTS)
    some = {max(1, min(most, waves * blocks // max(1, rows))) for waves in (1, 2, 3, 4)}

    def time(n):
        waves, each = -(-rows * n // blocks), -(-spans // n)
        slow = 4 / 3 if n > 1 and waves == 1 and each >= LONG_PART else 1
        return waves * (slow * each + 1.5) + (2 if n > 1 else 0)

    best = parts or min(sorted({1} | some), key=time)
    length = -(-spans // best) * SPAN
    return -(-count // length), length
