"""Candidate pools on a GPU; the contract is dsv41.indexer.candidate_blocks' docstring."""

import cupy
import numpy as np

from dsv41.indexer import candidate_blocks as text

from ..arguments import cuda_array
from ..indexing import SHARED_BYTES
from ..launch import THREADS, grid, kernel, launch
from ..orderedrows import MOST_CHOSEN, SHORT, choose_rows

LONG = 4096  # blocks from which on many blocks of threads share a row


def candidate_blocks(scores, visible, block_size, budget):
    tokens, count = scores.shape
    blocks = -(-count // block_size)
    long = 4 * blocks > SHARED_BYTES
    if scores.dtype != np.float32 or (long and budget > MOST_CHOSEN):
        return text.definition(scores, visible, block_size, budget)
    scores = cuda_array("scores", scores, np.float32)
    visible = cuda_array("visible", visible, np.int64, shape=(tokens,))
    if blocks >= LONG and (blocks <= SHORT or budget <= MOST_CHOSEN):
        best = block_scores(scores, visible, block_size)
        return choose_rows(best, visible, budget, per=block_size)
    return blocks_v1(scores, visible, block_size, budget)


def blocks_v1(scores, visible, block_size, budget):
    """Rows whose blocks fit into shared memory."""
    tokens, count = scores.shape
    shared = 4 * -(-count // block_size)
    out = cupy.empty((tokens, budget), cupy.int64)
    run = kernel("candidate_blocks", "blocks_v1", shared=SHARED_BYTES)
    sizes = np.int64(count), np.int32(block_size), np.int32(budget)
    launch(run, tokens if budget else 0, THREADS, (scores, visible, out, *sizes), shared)
    return out


def block_scores(scores, visible, block_size):
    """(T, blocks) float32: what each block counts by."""
    tokens, count = scores.shape
    blocks = -(-count // block_size)
    best = cupy.empty((tokens, blocks), np.float32)
    sizes = np.int64(count), np.int64(blocks), np.int64(best.size), np.int32(block_size)
    run = kernel("candidate_blocks", "maxima_v2")
    launch(run, grid(best.size), THREADS, (scores, visible, best, *sizes))
    return best
