"""Index scores on a GPU; the contract is dsv41.indexer.index_scores' docstring."""

import cupy
import numpy as np

from dsv41.indexer import index_scores as text

from ..arguments import require
from ..indexing import (
    BLOCKS,
    RING_BYTES,
    WARPS,
    equal_shares,
    key_array,
    macros,
    on_tensor_cores,
    query_arrays,
)
from ..launch import grid, kernel, launch, processors

THREADS = 128
PREFILL = 16  # queries from which on it pays to unpack a key once for all
BATCH, V3_KEYS, V3_THREADS, V3_BYTES = 8, 256, 512, 3 * 8 * (32 * 128 + 4 * 32)
V5_KEYS, V5_THREADS = 256, 512
V5_BATCH, V5_STAGES = 8, 5  # queries that are fetched at once, and how often there is room for that
V6_WARPS = 16  # of a block


def index_scores(q, w, keys, numerics):
    known = macros(q, numerics)
    if known is None:
        return text.definition(q, w, keys, numerics)
    tokens, count, listed = len(q), keys.shape[-2], keys.ndim == 3
    require(not listed or len(keys) == tokens, f"keys: {tokens} lists expected, got {keys.shape}")
    q, w = query_arrays(q, w)
    keys = key_array(keys, q.shape[2], numerics, ndim=3 if listed else 2)
    if on_tensor_cores(known) and not listed and tokens >= PREFILL:
        return scores_v5(known, q, w, keys)
    if on_tensor_cores(known) and not (listed and count % 4):  # lists begin on 16 bytes
        return scores_v6(known, q, w, keys)
    return scores_v1(known, q, w, keys)


def scores_v1(known, q, w, keys):
    """One thread per key and query."""
    arguments, tokens, count = _arguments(q, w, keys)
    run = kernel("index_scores", "scores_v1", **known)
    launch(run, tokens * -(-count // THREADS), THREADS, arguments)
    return arguments[3]


def scores_v2(known, q, w, keys, name="scores_v2"):
    """Keys on tensor cores, split so that every SM has work."""
    arguments, tokens, count = _arguments(q, w, keys)
    chunk = equal_shares(tokens, count)
    run = kernel("index_scores", name, shared=RING_BYTES, **known)
    launch(run, tokens * -(-count // chunk), 32 * WARPS, (*arguments, np.int64(chunk)), RING_BYTES)
    return arguments[3]


def scores_v3(known, q, w, keys):
    """FP8 products of every query with every key."""
    (*_, scores, _, _), tokens, count = _arguments(q, w, keys)
    encoded, weights = cupy.empty(q.shape, np.uint8), cupy.empty_like(w)
    inexact, heads = cupy.zeros(tokens, np.uint32), np.int64(w.size)
    run = kernel("index_scores", "encode_v3", **known)
    launch(run, grid(w.size, 8), 256, (q, w, encoded, weights, inexact, heads))
    tiles = -(-count // V3_KEYS)
    share = max(64, BATCH * -(-tokens * tiles // (BATCH * 4 * BLOCKS)))  # queries of one block
    sizes = (np.int64(n) for n in (tokens, count, share))
    run = kernel("index_scores", "scores_v3", shared=V3_BYTES, **known)
    blocks = tiles * -(-tokens // share)
    launch(run, blocks, V3_THREADS, (encoded, weights, keys, scores, *sizes), V3_BYTES)
    run = kernel("index_scores", "repair_v1", **known)
    launch(run, tokens if count else 0, THREADS, (q, w, keys, inexact, scores, np.int64(count)))
    return scores


def scores_v4(known, q, w, keys):
    """v2 by FP8 products."""
    return scores_v2(known, q, w, keys, "scores_v4")


def scores_v5(known, q, w, keys):
    """INT8 products of every query with every key; FP8 products where one does not fit."""
    (*_, scores, _, _), tokens, count = _arguments(q, w, keys)
    tiles, batches = -(-count // V5_KEYS), -(-tokens // V5_BATCH)
    query_bytes = 32 * (128 + (2 if known["BF16"] else 4))
    encoded = cupy.empty(batches * V5_BATCH * query_bytes, np.uint8)
    odd = cupy.zeros(tokens + tiles, np.uint32)
    odd_query, odd_tile = odd[:tokens], odd[tokens:]
    run = kernel("index_scores", "encode_v5", **known)
    launch(run, grid(w.size, 8), 256, (q, w, encoded, odd_query, np.int64(w.size)))
    shared = V5_STAGES * V5_BATCH * query_bytes
    run = kernel("index_scores", "scores_v5", shared=shared, **known)
    share = V5_BATCH * max(8, -(-batches * tiles // (4 * BLOCKS)))  # queries of one block
    sizes = np.int32(tokens), np.int64(count), np.int32(share)
    blocks = tiles, -(-tokens // share)
    launch(run, blocks, V5_THREADS, (encoded, keys, scores, odd_tile, *sizes), shared)
    run = kernel("index_scores", "repair_v5", shared=RING_BYTES, **known)
    arguments = (q, w, keys, odd_query, odd_tile, scores, np.int64(tokens), np.int64(count))
    launch(run, BLOCKS if count else 0, 32 * WARPS, arguments, RING_BYTES)
    return scores


def scores_v6(known, q, w, keys):
    """v4 by INT8 products, in blocks that have an SM each."""
    arguments, tokens, count = _arguments(q, w, keys)
    chunk = equal_shares(tokens, count, V6_WARPS, processors(), 32)
    shared, blocks = V6_WARPS * RING_BYTES // WARPS, tokens * -(-count // chunk)
    run = kernel("index_scores", "scores_v6", shared=shared, **known)
    launch(run, blocks, 32 * V6_WARPS, (*arguments, np.int64(chunk)), shared)
    return arguments[3]


def _arguments(q, w, keys):
    """q, w, keys, new scores (T, N), N, and the keys from one query to the next; T and N."""
    tokens, count = len(q), keys.shape[-2]
    scores = cupy.empty((tokens, count), cupy.float32)
    per_query = np.int64(count if keys.ndim == 3 else 0)
    return (q, w, keys, scores, np.int64(count), per_query), tokens, count
