"""Who makes global KV, who selects from it, and who only reads? (CSA2)

Every layer attends to its own window. Layers with a ratio also attend to compressed entries:

    full      compresses its input into new entries, writes main KV and index keys, selects
    reindex   writes nothing; selects with its own queries among the source's keys, or, behind the
              layer that publishes a candidate pool, among the keys of each query's pool
    reuse     writes nothing, scores nothing; reads the entries that its index source selected

So a Reuse layer reads three things: its own window records, the main KV of `layer.kv_source`, and
the entry numbers that `layer.index_source` put into `call.shared` during this same call. The
records live in the cache, owned by the source layer; the selections live in `Shared` (call.py),
made anew for every call, so that no layer can see another call's, another request's or a not yet
computed choice. Source: Attention in the released inference/model.py; report, section 2.3.1.
"""

import numpy as np

from . import indexer
from .compress import compress, main_kv
from .dispatch import beside, block_elements
from .projections import grouped_output, low_rank_queries
from .rope import frequencies
from .sparse_attn import rope_sparse_attn
from .trace import open_scores, put, put_pool, put_scores
from .window import window_kv, window_records


def attention(x, p, layer, call):
    """One attention sublayer: x (T, D) f32, the normed collapse of the streams -> y (T, D) f32.

    p: the layer's "attn" parameters. Appends to the cache, and to `call.shared` where the layer
    selects.
    """
    batch, cache, config, numerics = call.batch, call.cache, call.config, call.numerics
    freqs = frequencies(config, layer.ratio)
    c_q, q = low_rank_queries(x, p, config, numerics)
    own = window_kv(x, p, call.here.positions, freqs, config, numerics)
    put(call.trace, layer, "attn.swa_kv", lambda: numerics.window_kv.decode(own, config.head_dim))
    if layer.mode == "full":
        write_global_kv(x, p, layer, call)
    if layer.selects:
        select(x, c_q, p, layer, call)
    window = window_records(cache.window[layer.index][batch.slots], own)
    o = rope_sparse_attn(
        *(q, call.here.positions, freqs, window, call.window_rows),
        *global_rows_of(layer, call),
        p["attn_sink"],
        numerics,
    )
    cache.write_window(layer.index, batch, own)
    return grouped_output(o, p, config, numerics)


def write_global_kv(x, p, layer, call):
    """Compress x and append the new entries' main KV and index keys to the source's pools.

    Tokens whose entries the cache has already add nothing: a stored prefix that is replayed, or
    rows that ced.py has written before it let most of them go.
    """
    new = call.cache.not_written(layer.index, call.batch)
    if not new.any():
        return
    batch, cache, config, numerics = call.batch.only(new), call.cache, call.config, call.numerics
    source, freqs = layer.index, frequencies(config, layer.ratio)
    latent, entries, owners = compress(
        _rows(x, new), p["compressor"], source, layer.ratio, cache, batch, config, numerics
    )
    positions = beside(entries * layer.ratio, cache.like)  # of the groups' first tokens
    # trap: the index key is made from the latent before rotation and before FP4
    kv = main_kv(latent, positions, freqs, numerics)
    keys = indexer.index_keys(latent, p["indexer"], positions, freqs, config, numerics)
    cache.write_entries(source, entries, owners, kv, keys)
    cache.mark_written(source, batch)
    put(call.trace, layer, "cmp.latent", lambda: latent)
    put(call.trace, layer, "cmp.main_kv", lambda: numerics.main_kv.decode(kv, config.head_dim))
    put(call.trace, layer, "idx.k", lambda: numerics.index.decode(keys, config.index_head_dim))


def _rows(x, keep):
    """x where the NumPy mask `keep` holds; x itself when it holds everywhere."""
    return x if keep.all() else x[beside(np.flatnonzero(keep), x)]


def select(x, c_q, p, layer, call):
    """Score the source's keys and put the top-k, and the pool if published, into `call.shared`.

    Runs over blocks of queries of one request, so that no (T, N) array exists.
    """
    here, config, shared = call.here, call.config, call.shared
    freqs = frequencies(config, layer.ratio)
    q, w = indexer.index_queries(x, c_q, p["indexer"], here.positions, freqs, config, call.numerics)
    visible = (here.positions + 1) // layer.ratio
    shared.selected[layer.index] = np.zeros((len(x), config.index_topk), np.int64, like=x) - 1
    if layer.candidates == "publish":
        shared.pool = np.zeros((len(x), config.candidate_topk_blocks), np.int64, like=x) - 1
    open_scores(call.trace, layer, visible)
    choose = choose_in_pool if layer.candidates == "consume" else choose_anywhere
    for slot, rows, first, end in call.batch.segments():
        for at in _query_blocks(rows, layer, end // layer.ratio, config, block_elements(x)):
            seen = (first + at.stop - rows.start) // layer.ratio  # by the last query, the most
            if seen:
                scores = choose(q[at], w[at], slot, seen, visible[at], at, layer, call)
                put_scores(call.trace, layer, at, visible, *scores)
    put(call.trace, layer, "idx.q", lambda: q)
    put(call.trace, layer, "idx.w", lambda: w)
    put(call.trace, layer, "idx.topk", lambda: shared.selected[layer.index])
    put_pool(call.trace, layer, shared, visible, config)


def choose_anywhere(q, w, slot, seen, visible, at, layer, call):
    """Top-k over the request's first `seen` keys for the queries in rows `at`; the scan that grows
    with the context. Returns what a trace shows: scores (t, N), and None for "all entries".
    """
    config, shared = call.config, call.shared
    keys = call.cache.index_keys(layer.kv_source, slot, seen)
    scores = indexer.index_scores(q, w, keys, call.numerics)
    shared.selected[layer.index][at] = indexer.index_topk(scores, visible, config.index_topk)
    if layer.candidates == "publish":
        shared.pool[at] = indexer.candidate_blocks(
            scores, visible, config.candidate_block_size, config.candidate_topk_blocks
        )
    return scores, None


def choose_in_pool(q, w, slot, seen, visible, at, layer, call):
    """Top-k among each query's pool; only the pool's keys are read. Returns what a trace shows:
    scores (t, P) and the pool's entry numbers (t, P).
    """
    config, shared, source = call.config, call.shared, layer.kv_source
    used = -(-seen // config.candidate_block_size)  # no query keeps more blocks than that
    entries = indexer.pool_entries(shared.pool[at][:, :used], config.candidate_block_size)
    readable = np.clip(entries, 0, seen - 1)  # the newest block may reach past the last key
    keys = call.cache.index[source][call.cache.rows(source, slot, readable)]
    scores = indexer.index_scores(q, w, keys, call.numerics)
    shared.selected[layer.index][at] = indexer.pool_topk(
        scores, entries, visible, config.index_topk
    )
    return scores, entries


def _query_blocks(rows, layer, keys, config, most):
    """Cut a request's rows so that scores, and the keys of a pool, stay below `most` elements."""
    if layer.candidates == "consume":
        keys = min(keys, config.candidate_topk_blocks * config.candidate_block_size)
        per_query = keys * max(config.index_n_heads, config.index_head_dim)
    else:
        per_query = keys * config.index_n_heads
    step = max(1, most // max(1, per_query))
    for begin in range(rows.start, rows.stop, step):
        yield slice(begin, min(begin + step, rows.stop))


def global_rows_of(layer, call):
    """What this layer reads of the past: pool of main KV records, and rows (T, K) per query."""
    batch, cache = call.batch, call.cache
    if layer.mode == "swa":
        return cache.no_records(len(batch.ids))
    entries = call.shared.selected[layer.index_source]
    rows = cache.rows_of_all(layer.kv_source, batch.slots, call.here.order, entries)
    return cache.main_kv[layer.kv_source], rows
