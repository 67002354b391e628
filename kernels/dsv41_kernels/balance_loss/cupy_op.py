"""The balance loss on a GPU; the contract is dsv41.train.losses.balance_loss's docstring."""

import cupy
import numpy as np

from ..launch import grid, kernel


def balance_loss(scores, chosen, order, documents):
    scores, (tokens, experts) = cupy.ascontiguousarray(scores, np.float32), scores.shape
    chosen, order = (cupy.ascontiguousarray(a, np.int64) for a in (chosen, order))
    counts, lengths = cupy.zeros((documents, experts), np.int32), cupy.zeros(documents, np.int32)
    share, dscores = cupy.empty(tokens, np.float32), cupy.empty_like(scores)
    sizes = np.int64(tokens), np.int32(experts), np.int32(chosen.shape[1])
    if tokens:
        run = kernel("balance_loss", "count_choices")
        run(grid(tokens), (256,), (chosen, order, counts, lengths, *sizes))
        run = kernel("balance_loss", "balance_loss")
        run(grid(tokens), (256,), (scores, order, counts, lengths, share, dscores, *sizes))
    return share.mean(), dscores
