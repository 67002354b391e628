"""Which compressed entries does a query read? (lightning indexer, candidate pool)

A few small heads score every visible entry, and the best k are attended to:

    I[t, j] = sum_a w[t, a] * relu( q[t, a] . k_j )          j visible when (j + 1) m <= t + 1

q comes from the same low-rank query latent as the attention queries, k from the compressed latent,
w from the layer input; q and k are rotated and live in MXFP4. Best means: higher score, then lower
entry number, with -0 equal to +0; selections are listed ascending and padded with -1.

Hierarchical selection: layer 20's scores also rank blocks of 8 entries by their maximum. Its best
2,048 blocks, the block of the newest entry always among them, are the pool of that query, and the
index sources behind it score and select only there. Source: Indexer in the released
inference/model.py; report, section 2.3.2. Left out: the release lets a source that closes no pair
in a decode step read another source's keys; here a source always reads its own.
"""

import numpy as np

from .dispatch import op
from .ops import linear, linear_fp8, rmsnorm
from .rope import rotate

KEY_BLOCK = 128  # keys per product under batch_invariant


def index_keys(latent, p, positions, freqs, config, numerics):
    """latent (N, C) f32 before rotation, p the "indexer" parameters -> key records (N, Z)."""
    k = linear(latent, p["wk"]["weight"], numerics)
    k = rmsnorm(k, p["k_norm"]["weight"], config.rms_norm_eps, numerics)
    return numerics.index.encode(numerics.store(rotate(k, positions, freqs)))


def index_queries(x, c_q, p, positions, freqs, config, numerics):
    """x (T, D) layer input, c_q (T, Q) query latent -> q (T, I, J) f32 and w (T, I) f32.

    w includes the scale (I * J)^-1/2.
    """
    heads, channels = config.index_n_heads, config.index_head_dim
    q = linear_fp8(c_q, p["wq_b"]["weight"], numerics).reshape(-1, heads, channels)
    q = numerics.index.fake(numerics.store(rotate(q, positions, freqs)))
    w = linear(x, p["weights_proj"]["weight"], numerics)
    return q, numerics.store(w * np.float32(channels**-0.5 * heads**-0.5))


@op
def index_scores(q, w, keys, numerics):
    """Scores of every query against every key.

    q (T, I, J) f32, w (T, I) f32, keys (N, Z) index records, or (T, P, Z): a list per query
    -> (T, N) or (T, P) f32. Every stage is stored as bf16, as in the release; ties are common.
    """
    k = numerics.index.decode(keys, q.shape[-1])
    if numerics.batch_invariant:
        dots = _dots_in_blocks(q, k)
    elif k.ndim == 2:
        dots = (q.reshape(-1, q.shape[-1]) @ k.T).reshape((*q.shape[:2], len(k)))
    else:
        dots = q @ k.transpose(0, 2, 1)  # (T, I, P)
    # trap: the relu is per head and before the weights, which may be negative
    weighted = numerics.store(np.maximum(numerics.store(dots), np.float32(0)) * w[:, :, None])
    return numerics.store(np.sum(weighted, axis=1))


def _dots_in_blocks(q, k):
    """The same dots, each computed by a product of one fixed shape (I, J) x (J, KEY_BLOCK)."""
    *outer, count, channels = k.shape
    blocks = -(-count // KEY_BLOCK)
    padded = np.zeros((*outer, blocks * KEY_BLOCK, channels), np.float32, like=k)
    padded[..., :count, :] = k
    tiles = padded.reshape((*outer, blocks, KEY_BLOCK, channels)).swapaxes(-1, -2)
    dots = q[:, None] @ tiles  # (T, blocks, I, KEY_BLOCK)
    return dots.transpose(0, 2, 1, 3).reshape((*q.shape[:2], blocks * KEY_BLOCK))[..., :count]


@op
def index_topk(scores, visible, k):
    """The k best entries of each row, ascending, padded with -1.

    scores (T, N) f32, visible (T,) int: entries from there on are not eligible, nor is -inf
    -> (T, k) int64.
    """
    rows, count = scores.shape
    chosen = np.zeros((rows, k), np.int64, like=scores) - 1
    if count == 0:
        return chosen
    hidden = np.arange(count, like=scores) >= visible[:, None]
    masked = np.where(hidden, np.float32(-np.inf), scores)
    kept = _best(masked, k) & (masked > -np.inf)
    rank = np.cumsum(kept, axis=1) - 1
    row, entry = np.nonzero(kept)
    chosen[row, rank[row, entry]] = entry
    return chosen


def _best(scores, k):
    """(T, N) bool: the k best of each row; equal scores are taken from the left."""
    if k >= scores.shape[1]:
        return scores == scores  # all of them
    kth = np.partition(scores, scores.shape[1] - k, axis=1)[:, -k][:, None]
    above, equal = scores > kth, scores == kth
    room = k - np.sum(above, axis=1, keepdims=True)
    return above | (equal & (np.cumsum(equal, axis=1) <= room))


@op
def candidate_blocks(scores, visible, block_size, budget):
    """The pool of each query: its best blocks, ascending, padded with -1.

    scores (T, N) f32, visible (T,) int -> (T, budget) int64 block numbers. A block counts by its
    best visible entry; the block of the newest visible entry is always kept.
    """
    best = block_scores(scores, visible, block_size)
    return index_topk(best, -(-visible // block_size), budget)


def block_scores(scores, visible, block_size):
    """(T, N) scores -> (T, ceil(N / block_size)) maxima over visible entries, newest block +inf."""
    rows, count = scores.shape
    blocks = -(-count // block_size)
    padded = np.zeros((rows, blocks * block_size), np.float32, like=scores) - np.float32(np.inf)
    seen = np.arange(count, like=scores) < visible[:, None]
    padded[:, :count] = np.where(seen, scores, padded[:, :count])
    best = np.max(padded.reshape(rows, blocks, block_size), axis=2)
    newest = (visible - 1) // block_size  # -1 when nothing is visible
    is_newest = np.arange(blocks, like=scores) == newest[:, None]
    return np.where(is_newest, np.float32(np.inf), best)


def pool_entries(blocks, block_size):
    """blocks (T, B) int, -1 padded -> entry numbers (T, B * block_size), -1 in empty blocks."""
    entries = blocks[:, :, None] * block_size + np.arange(block_size, like=blocks)
    return np.where(blocks[:, :, None] < 0, -1, entries).reshape(len(blocks), -1)


@op
def pool_topk(scores, entries, visible, k):
    """The k best entries of each query's own list.

    scores (T, P) f32 of the entries (T, P) int, ascending with -1 among them; visible (T,) int
    -> (T, k) int64 entry numbers, ascending, padded with -1.
    """
    eligible = (entries >= 0) & (entries < visible[:, None])
    masked = np.where(eligible, scores, np.float32(-np.inf))
    everything = visible * 0 + scores.shape[1]
    column = index_topk(masked, everything, k)
    return np.where(column < 0, -1, np.take_along_axis(entries, np.maximum(column, 0), axis=1))
