"""Top-k of rows on a GPU; the contract is dsv41.indexer.index_topk's docstring."""

import cupy
import numpy as np

from dsv41.indexer import index_topk as text

from ..arguments import cuda_array
from ..indexing import SHARED_BYTES
from ..launch import kernel, launch


def index_topk(scores, visible, k):
    tokens, count = scores.shape
    if 4 * count > SHARED_BYTES:
        return text.definition(scores, visible, k)
    scores = cuda_array("scores", scores, np.float32)
    visible = cuda_array("visible", visible, np.int64, shape=(tokens,))
    chosen = cupy.empty((tokens, k), cupy.int64)
    run = kernel("index_topk", "topk_v1", shared=SHARED_BYTES)
    arguments = (scores, visible, chosen, np.int64(count), np.int32(k))
    launch(run, tokens if k else 0, _threads(count), arguments, 4 * count)
    return chosen


def _threads(count):
    """More threads for longer rows, in whole warps."""
    return min(512, max(64, 32 * -(-count // 256)))
