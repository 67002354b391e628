"""Top-k of rows on a GPU; the contract is dsv41.indexer.index_topk's docstring."""

import cupy
import numpy as np

from dsv41.indexer import index_topk as text

from ..arguments import cuda_array
from ..indexing import SHARED_BYTES
from ..launch import kernel, launch
from ..orderedrows import MOST_CHOSEN, SHORT, choose_rows, threads

MOST_INDICES = (1 << 31) - (1 << 15)  # an int holds them and a block's share more


def index_topk(scores, visible, k):
    tokens, count = scores.shape
    ordered = count <= SHORT or k <= MOST_CHOSEN
    known = scores.dtype == np.float32 and count < MOST_INDICES
    if not known or not (ordered or 4 * count <= SHARED_BYTES):
        return text.definition(scores, visible, k)
    scores = cuda_array("scores", scores, np.float32)
    visible = cuda_array("visible", visible, np.int64, shape=(tokens,))
    return (choose_rows if ordered else topk_v1)(scores, visible, k)


def topk_v1(scores, visible, k):
    """Rows that fit into shared memory."""
    tokens, count = scores.shape
    chosen = cupy.empty((tokens, k), cupy.int64)
    run = kernel("index_topk", "topk_v1", shared=SHARED_BYTES)
    arguments = (scores, visible, chosen, np.int64(count), np.int32(k))
    launch(run, tokens if k else 0, threads(count), arguments, 4 * count)
    return chosen
