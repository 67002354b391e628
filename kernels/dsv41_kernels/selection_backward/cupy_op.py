"""The index loss on a GPU; the contract is dsv41.train.indexer.selection_backward's docstring."""

import cupy
import numpy as np

from dsv41.train.indexer import selection_backward as text

from ..arguments import cuda_array
from ..indexing import SHARED_BYTES, key_array, macros, query_arrays
from ..launch import kernel, launch

MOST_BITS = 1 << 33  # of the matrix of keys and queries, 1 GB


def selection_backward(q, w, keys, rows, attention, weight, numerics):
    (tokens, heads, channels), k, count = q.shape, rows.shape[1], len(keys)
    known, words, shared = macros(q, numerics), -(-tokens // 32), 4 * (heads + 1) * k
    if known is None or shared > SHARED_BYTES or 32 * words * count > MOST_BITS or not tokens * k:
        return text.definition(q, w, keys, rows, attention, weight, numerics)
    q, w = query_arrays(q, w)
    keys, rows = key_array(keys, channels, numerics), cuda_array("rows", rows, np.int64)
    attention = cuda_array("attention", attention, np.float32, shape=rows.shape)
    dq, dw, losses = cupy.empty_like(q), cupy.empty_like(w), cupy.empty(tokens, np.float32)
    ddots, dkeys = (cupy.empty(s, np.float32) for s in ((tokens, heads, k), (count, channels)))
    seen, sizes = cupy.zeros((count, words), np.uint32), (np.int64(words), np.int32(k))
    run = kernel("selection_backward", "queries_v1", shared=SHARED_BYTES, **known)
    inputs, outputs = (q, w, keys, rows, attention), (losses, dq, dw, ddots, seen)
    launch(
        run, tokens, 128, (*inputs, np.float32(weight), *outputs, *sizes, np.int64(count)), shared
    )
    run = kernel("selection_backward", "keys_v1", **known)
    launch(run, count, 256, (q, rows, ddots, seen, dkeys, *sizes))
    return cupy.sum(losses), dq, dw, dkeys
