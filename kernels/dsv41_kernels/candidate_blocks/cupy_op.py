"""Candidate pools on a GPU; the contract is dsv41.indexer.candidate_blocks' docstring."""

import cupy
import numpy as np

from dsv41.indexer import candidate_blocks as text

from ..arguments import cuda_array
from ..indexing import SHARED_BYTES
from ..launch import THREADS, kernel, launch


def candidate_blocks(scores, visible, block_size, budget):
    tokens, count = scores.shape
    shared = 4 * -(-count // block_size)
    if shared > SHARED_BYTES:
        return text.definition(scores, visible, block_size, budget)
    scores = cuda_array("scores", scores, np.float32)
    visible = cuda_array("visible", visible, np.int64, shape=(tokens,))
    blocks = cupy.empty((tokens, budget), cupy.int64)
    run = kernel("candidate_blocks", "blocks_v1", shared=SHARED_BYTES)
    sizes = np.int64(count), np.int32(block_size), np.int32(budget)
    launch(run, tokens if budget else 0, THREADS, (scores, visible, blocks, *sizes), shared)
    return blocks
