"""The three launches that choose from rows too long for one block of threads (topk_long.cuh)."""

import cupy
import numpy as np

from . import launch

SAMPLE, ROOM, THREADS = 8192, 16384, 1024  # as in topk_long.cuh
FILTER_THREADS, FILTERED = 256, 4096
MOST_CHOSEN = 4096


def choose_long(op, source, count, k):
    """source: the arrays of op's kernels that say what a row of `count` keys is, the first with a
    row for each query -> (T, k) int64.
    """
    rows = len(source[0])
    chosen, space = (cupy.empty((rows, n), d) for n, d in ((k, np.int64), (ROOM, np.uint64)))
    bounds, used = (cupy.empty(rows, np.uint32) for _ in range(2))
    source, sizes = (*source, np.int64(count)), (np.int32(k),)
    guess, settle = 4 * SAMPLE, 8 * ROOM
    run = launch.kernel(op, "guess_v2", shared=guess)
    launch.launch(run, rows, THREADS, (*source, *sizes, bounds, used), guess)
    run, parts = launch.kernel(op, "filter_v2"), -(-count // FILTERED)
    launch.launch(run, rows * parts, FILTER_THREADS, (*source, bounds, used, space))
    run = launch.kernel(op, "settle_v2", shared=settle)
    launch.launch(run, rows, THREADS, (*source, *sizes, used, space, chosen), settle)
    return chosen
