"""Chapter 05: answers come from dsv41.indexer, dsv41.ledger and dsv41.train.indexer."""

import numpy as np

from dsv41.indexer import index_topk
from dsv41.ledger import index_entries
from dsv41.quant import FLOAT32, INDEX_FP4
from dsv41.train.indexer import index_scores_backward

from ..page import Exercise


def _merge(left, left_scores, right, right_scores, k):
    scores = np.concatenate([left_scores, right_scores])
    column = index_topk(scores[None], np.array([len(scores)]), k)[0]
    return np.concatenate([left, right])[column]


def _halves(rng):
    for k in (1, 3, 8, 8, 8, 8, 8, 8):
        scores = rng.integers(-2, 3, 60).astype(np.float32)  # full of ties
        cut = int(rng.integers(k, 60 - k))
        best = [
            index_topk(half[None], np.array([len(half)]), k)[0]
            for half in (scores[:cut], scores[cut:])
        ]
        right = best[1] + cut
        yield best[0], scores[best[0]], right, scores[right], k
    yield np.array([0, 1]), np.float32([-1, -2]), np.array([5, 6]), np.float32([3, 3]), 2
    yield np.array([0, 1]), np.float32([0, -0.0]), np.array([5, 6]), np.float32([0, 0]), 2


def _scanned_bytes(n):
    return index_entries("V4.1-Flash", n) * INDEX_FP4.record_bytes(128)


def _contexts(rng):
    special = [1, 2, 3, 511, 16_383, 16_384, 16_385, 1_048_576]
    return [(int(n),) for n in (*special, *rng.integers(1, 1_048_577, 20))]


def _key_gradient(G, q, w, k):
    return index_scores_backward(G[None], q[None], w[None], k[None], FLOAT32)[2][0]


def _gradients(rng):
    for _ in range(10):
        q, k = rng.integers(-2, 3, (4, 3)) * 1.0, rng.integers(-2, 3, (6, 3)) * 1.0  # dots of 0
        yield rng.standard_normal(6), q, rng.standard_normal(4), k


EXERCISES = {
    "merge": Exercise(
        _merge,
        blank="return the best k of both parts, ascending",
        hint="on equal scores all of left comes before right; sort by score first, then by entry",
        inputs=_halves,
    ),
    "scanned_bytes": Exercise(
        _scanned_bytes,
        blank="return entries scored by all layers, times 68",
        hint="three layers have n // 2 entries, one has n, four see a pool that ends at 16,384",
        inputs=_contexts,
    ),
    "key_gradient": Exercise(
        _key_gradient,
        blank="return dL/dk, one row for each key",
        hint="sum over the heads whose relu is open; each adds G times its weight times its query",
        inputs=_gradients,
        within=1e-9,
    ),
}
