"""Top-k of listed entries on a GPU; the contract is dsv41.indexer.pool_topk's docstring."""

import cupy
import numpy as np

from dsv41.indexer import pool_topk as text

from ..arguments import cuda_array
from ..indexing import SHARED_BYTES
from ..launch import THREADS, kernel, launch
from ..orderedrows import SHORT, threads


def pool_topk(scores, entries, visible, k):
    tokens, count = scores.shape
    if scores.dtype != np.float32 or 4 * count > SHARED_BYTES:
        return text.definition(scores, entries, visible, k)
    scores = cuda_array("scores", scores, np.float32)
    entries = cuda_array("entries", entries, np.int64, shape=(tokens, count))
    visible = cuda_array("visible", visible, np.int64, shape=(tokens,))
    chosen = cupy.empty((tokens, k), cupy.int64)
    arguments = (scores, entries, visible, chosen, np.int32(count), np.int32(k))
    blocks = tokens if k else 0
    if count <= SHORT:
        launch(kernel("pool_topk", "topk_v2"), blocks, threads(count), arguments)
    else:
        run = kernel("pool_topk", "topk_v1", shared=SHARED_BYTES)
        launch(run, blocks, THREADS, arguments, 4 * count)
    return chosen
