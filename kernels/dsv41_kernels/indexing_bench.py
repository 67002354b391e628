"""Inputs and checks that the benchmarks of the indexer's kernels share.

Random bytes are made once in CPU memory and repeated on the GPU, shifted by a prime each time, so
that no cache and no tie can profit from the repetition.
"""

import cupy
import numpy as np

from dsv41.indexer import index_scores
from dsv41.quant import FLOAT32, INDEX_FP4, OFFICIAL
from dsv41.selection import Entries

HEADS, CHANNELS, RECORD = 32, 128, 68  # the released model
SEEN = 1 << 16  # records made in CPU memory
FOUR_BIT = FLOAT32.but(index=INDEX_FP4)  # MXFP4 keys, float32 arithmetic


def queries(tokens, heads=HEADS, channels=CHANNELS, numerics=OFFICIAL, seed=0):
    """q (T, I, J) and w (T, I) as index_queries makes them, on the GPU."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((tokens, heads, channels), np.float32)
    w = rng.standard_normal((tokens, heads), np.float32) / 64
    return cupy.asarray(numerics.index.fake(numerics.store(q))), cupy.asarray(numerics.store(w))


def repeated(base, count):
    """(count, ...) from the rows of `base`, each copy shifted by some rows more."""
    base, parts = cupy.asarray(base), []
    for n in range(-(-count // len(base))):
        parts.append(cupy.roll(base, 7919 * n, axis=0))
    return cupy.ascontiguousarray(cupy.concatenate(parts)[:count])


def packed_keys(count, seed=1):
    """(count, 68) MXFP4 records of normal numbers."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((min(count, SEEN), CHANNELS), np.float32)
    return repeated(INDEX_FP4.encode(keys), count)


def float_rows(rows, count, seed=2):
    """(rows, count) float32 normal numbers."""
    flat = np.random.default_rng(seed).standard_normal(min(rows * count, 1 << 22), np.float32)
    return repeated(flat, rows * count).reshape(rows, count)


def decode_entries(keys, requests, seen, page=64):
    """Entries of `requests` queries that see `seen` entries each, in pages in a random order."""
    per_request = -(-seen // page)
    pages = np.random.default_rng(3).permutation(requests * per_request)
    pages = cupy.asarray(pages.reshape(requests, per_request).astype(np.int64))
    order, reach = np.arange(requests), np.full(requests, seen)
    spans = [(r, slice(r, r + 1)) for r in range(requests)]
    return Entries(keys, pages, page, cupy.asarray(order), cupy.asarray(reach), spans, reach)


def packed_documents(keys, documents, length):
    """Entries of whole documents, laid end to end, ratio 1."""
    pages = cupy.arange(documents * length // 16).reshape(documents, -1)
    order, reach = (
        np.repeat(np.arange(documents), length),
        np.tile(np.arange(length), documents) + 1,
    )
    spans = [(r, slice(r * length, (r + 1) * length)) for r in range(documents)]
    return Entries(keys, pages, 16, cupy.asarray(order), cupy.asarray(reach), spans, reach)


def check_scores(q, w, keys, scores, numerics, samples=512, ties=0.01):
    """scores(t) -> (N,) row t; keys(t, j) -> records. Compares some entries of a few rows with the
    definition in CPU memory -> the largest error over the largest score. ties: the share that may
    have fallen to the other side of a bf16.
    """
    worst = 0.0
    for t in sorted({0, len(q) // 2, len(q) - 1}):
        row = scores(t)
        j = np.unique(np.linspace(0, len(row) - 1, samples).astype(np.int64))
        arguments = q[t : t + 1].get(), w[t : t + 1].get(), keys(t, cupy.asarray(j)).get()
        want = index_scores.definition(*arguments, numerics)[0]
        error = np.abs(row[cupy.asarray(j)].get() - want)
        assert error.max() <= (2.0**-7 if numerics.bf16 else 1e-5) * np.abs(want).max()
        assert not numerics.bf16 or np.mean(error > 0) < ties, "more than ties differ"
        worst = max(worst, float(error.max() / np.abs(want).max()))
    return worst


def check_best(scores, chosen, k):
    """scores (N,) f32 of a row, chosen (k,), on the GPU: exactly the k best, lower index first."""
    scores, chosen = scores.get(), chosen.get()
    order = np.lexsort((np.arange(len(scores)), -scores))[:k]
    want = np.sort(order[scores[order] > -np.inf])
    assert np.array_equal(chosen[: len(want)], want) and (chosen[len(want) :] == -1).all()
    return 0.0


def check_values(q, w, keys, chosen, entries=None):
    """Are these k the best of a query's keys, whichever of two equal ones was taken?

    q (1, I, J), w (1, I), keys (N, Z) on the GPU; chosen (k,): positions, or numbers of the
    ascending `entries` (N,) -> the largest gap between its scores and the best, over the largest.
    """
    row = index_scores.definition(q.get(), w.get(), keys.get(), OFFICIAL)[0]
    chosen = chosen.get()
    chosen = chosen if entries is None else np.searchsorted(entries.get(), chosen)
    assert len(np.unique(chosen)) == len(chosen), "an entry was chosen twice"
    best, got = np.sort(row)[-len(chosen) :], np.sort(row[chosen])
    gap = float(np.abs(best - got).max() / np.abs(best).max())
    assert gap <= 2.0**-6, f"chosen scores are up to {gap:.2%} below the best"
    return gap
