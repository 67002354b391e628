"""Selection in the pool on a GPU; the contract is dsv41.selection.choose_in_pool's docstring."""

import cupy
import numpy as np

from dsv41.selection import choose_in_pool as text

from ..arguments import cuda_array
from ..indexing import (
    RING_BYTES,
    RUN,
    SHARED_BYTES,
    WARPS,
    entry_arrays,
    key_array,
    keys_per_block,
    macros,
    on_tensor_cores,
    query_arrays,
)
from ..launch import kernel, launch
from ..orderedrows import SHORT, threads


def choose_in_pool(q, w, entries, blocks, block_size, k, numerics, watch=None):
    known, budget = macros(q, numerics), blocks.shape[1]
    if watch is not None or known is None or 4 * budget * block_size > SHARED_BYTES:
        return text.definition(q, w, entries, blocks, block_size, k, numerics, watch)
    arrays = (*query_arrays(q, w), key_array(entries.keys, q.shape[2], numerics))
    arrays = (*arrays, *entry_arrays(entries, len(q)))
    arrays = (*arrays, cuda_array("blocks", blocks, np.int64, shape=(len(q), budget)))
    fast = on_tensor_cores(known) and block_size == RUN and entries.per_page % RUN == 0
    if fast and budget * block_size <= SHORT:
        return choose_v2(arrays, entries.per_page, k, known)
    return choose_v1(arrays, entries.per_page, block_size, k, known)


def choose_v1(arrays, per_page, block_size, k, known):
    """arrays: q, w, keys, pages, order, visible, blocks. One launch."""
    tokens, budget = arrays[-1].shape
    chosen, shared = cupy.empty((tokens, k), cupy.int64), 4 * budget * block_size
    sizes = arrays[3].shape[1], per_page, k, block_size, budget
    run = kernel("choose_in_pool", "choose_v1", shared=SHARED_BYTES, **known)
    launch(run, tokens, 128, (*arrays, chosen, *map(np.int32, sizes)), shared)
    return chosen


def choose_v2(arrays, per_page, k, known, scoring="scores_v4"):
    """The same in two launches, the first on tensor cores."""
    tokens, budget = arrays[-1].shape
    count = budget * RUN
    listed, chosen = cupy.empty((tokens, count), np.float32), cupy.empty((tokens, k), np.int64)
    chunk = keys_per_block(tokens * count)
    sizes = arrays[3].shape[1], per_page, budget, chunk
    run = kernel("choose_in_pool", scoring, shared=RING_BYTES, **known)
    parts = tokens * -(-count // chunk)
    launch(run, parts, 32 * WARPS, (*arrays, listed, *map(np.int32, sizes)), RING_BYTES)
    run = kernel("choose_in_pool", "settle_v3", **known)
    arguments = (listed, arrays[-1], chosen, np.int32(k), np.int32(budget))
    launch(run, tokens if k else 0, threads(count), arguments)
    return chosen
