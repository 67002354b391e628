"""Top-k of rows on a GPU; the contract is dsv41.indexer.index_topk's docstring."""

import cupy
import numpy as np

from dsv41.indexer import index_topk as text

from ..arguments import cuda_array
from ..indexing import SHARED_BYTES
from ..launch import kernel, launch
from ..longrows import MOST_CHOSEN, choose_long

MOST_INDICES = 1 << 31


def index_topk(scores, visible, k):
    tokens, count = scores.shape
    long = 4 * count > SHARED_BYTES
    known = scores.dtype == np.float32 and count < MOST_INDICES
    if not known or (long and k > MOST_CHOSEN):
        return text.definition(scores, visible, k)
    scores = cuda_array("scores", scores, np.float32)
    visible = cuda_array("visible", visible, np.int64, shape=(tokens,))
    if long and k:
        return choose_long("index_topk", (scores, visible), count, k)
    return topk_v1(scores, visible, k)


def topk_v1(scores, visible, k):
    """Rows that fit into shared memory."""
    tokens, count = scores.shape
    chosen = cupy.empty((tokens, k), cupy.int64)
    run = kernel("index_topk", "topk_v1", shared=SHARED_BYTES)
    arguments = (scores, visible, chosen, np.int64(count), np.int32(k))
    launch(run, tokens if k else 0, _threads(count), arguments, 4 * count)
    return chosen


def _threads(count):
    """More threads for longer rows, in whole warps."""
    return min(1024, max(64, 32 * -(-count // 256)))
