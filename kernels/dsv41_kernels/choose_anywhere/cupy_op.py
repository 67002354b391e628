"""Score and select on a GPU; the contract is dsv41.selection.choose_anywhere's docstring."""

import cupy
import numpy as np

from dsv41.selection import choose_anywhere as text

from ..indexing import SHARED_BYTES, entry_arrays, key_array, macros, query_arrays
from ..launch import kernel, launch


def choose_anywhere(q, w, entries, k, pool, numerics, watch=None):
    tokens, longest = len(q), int(entries.reach.max(initial=0))
    size, budget = pool or (1, 0)
    shared = 4 * (longest + (-(-longest // size) if budget else 0))
    known = macros(q, numerics)
    if watch is not None or known is None or shared > SHARED_BYTES:
        return text.definition(q, w, entries, k, pool, numerics, watch)
    keys, arrays = key_array(entries.keys, q.shape[2], numerics), entry_arrays(entries, tokens)
    chosen, blocks = (cupy.empty((tokens, n), cupy.int64) for n in (k, budget))
    sizes = arrays[0].shape[1], entries.per_page, k, size, budget, longest
    arguments = (*query_arrays(q, w), keys, *arrays, chosen, blocks, *map(np.int32, sizes))
    run = kernel("choose_anywhere", "choose_v1", shared=SHARED_BYTES, **known)
    launch(run, tokens, 128, arguments, shared)
    return chosen, blocks if budget else None
