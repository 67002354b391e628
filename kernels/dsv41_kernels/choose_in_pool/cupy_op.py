"""Selection in the pool on a GPU; the contract is dsv41.selection.choose_in_pool's docstring."""

import cupy
import numpy as np

from dsv41.selection import choose_in_pool as text

from ..arguments import cuda_array
from ..indexing import SHARED_BYTES, entry_arrays, key_array, macros, query_arrays
from ..launch import kernel, launch


def choose_in_pool(q, w, entries, blocks, block_size, k, numerics, watch=None):
    tokens, budget = blocks.shape
    known, shared = macros(q, numerics), 4 * budget * block_size
    if watch is not None or known is None or shared > SHARED_BYTES:
        return text.definition(q, w, entries, blocks, block_size, k, numerics, watch)
    blocks = cuda_array("blocks", blocks, np.int64, shape=(len(q), budget))
    keys, arrays = key_array(entries.keys, q.shape[2], numerics), entry_arrays(entries, tokens)
    chosen = cupy.empty((tokens, k), cupy.int64)
    sizes = arrays[0].shape[1], entries.per_page, k, block_size, budget
    arguments = (*query_arrays(q, w), keys, *arrays, blocks, chosen, *map(np.int32, sizes))
    run = kernel("choose_in_pool", "choose_v1", shared=SHARED_BYTES, **known)
    launch(run, tokens, 128, arguments, shared)
    return chosen
