"""Index scores on a GPU; the contract is dsv41.indexer.index_scores' docstring."""

import cupy
import numpy as np

from dsv41.indexer import index_scores as text

from ..arguments import require
from ..indexing import (
    RING_BYTES,
    WARPS,
    key_array,
    keys_per_block,
    macros,
    on_tensor_cores,
    query_arrays,
)
from ..launch import kernel, launch

THREADS = 128


def index_scores(q, w, keys, numerics):
    known = macros(q, numerics)
    if known is None:
        return text.definition(q, w, keys, numerics)
    tokens, count, listed = len(q), keys.shape[-2], keys.ndim == 3
    require(not listed or len(keys) == tokens, f"keys: {tokens} lists expected, got {keys.shape}")
    q, w = query_arrays(q, w)
    keys = key_array(keys, q.shape[2], numerics, ndim=3 if listed else 2)
    scores = cupy.empty((tokens, count), cupy.float32)
    arguments = (q, w, keys, scores, np.int64(count), np.int64(count if listed else 0))
    if on_tensor_cores(known) and not (listed and count % 4):  # lists begin on 16 bytes
        scores_v2(known, arguments)
    else:
        run = kernel("index_scores", "scores_v1", **known)
        launch(run, tokens * -(-count // THREADS), THREADS, arguments)
    return scores


def scores_v2(known, arguments):
    """Keys on tensor cores, split so that every SM has work."""
    tokens, count = arguments[3].shape
    chunk = keys_per_block(tokens * count)
    run = kernel("index_scores", "scores_v2", shared=RING_BYTES, **known)
    launch(run, tokens * -(-count // chunk), 32 * WARPS, (*arguments, np.int64(chunk)), RING_BYTES)
