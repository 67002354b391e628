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
from .cache import paged_rows
from .compress import compress, main_kv
from .dispatch import beside
from .projections import grouped_output, low_rank_queries
from .rope import frequencies
from .selection import Entries, choose_anywhere, choose_in_pool
from .sparse_attn import rope_sparse_attn
from .trace import put, put_pool, watch_scores
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
    """Score the source's keys and put the top-k, and the pool if published, into `call.shared`."""
    here, config, shared = call.here, call.config, call.shared
    freqs = frequencies(config, layer.ratio)
    q, w = indexer.index_queries(x, c_q, p["indexer"], here.positions, freqs, config, call.numerics)
    entries, k, block_size = entries_of(layer, call), config.index_topk, config.candidate_block_size
    watch = watch_scores(call.trace, layer, entries.visible)
    if layer.candidates == "consume":
        chosen = choose_in_pool(q, w, entries, shared.pool, block_size, k, call.numerics, watch)
    else:
        publishes = layer.candidates == "publish"
        pool = (block_size, config.candidate_topk_blocks) if publishes else None
        chosen, blocks = choose_anywhere(q, w, entries, k, pool, call.numerics, watch)
        shared.pool = blocks if publishes else shared.pool
    shared.selected[layer.index] = chosen
    put(call.trace, layer, "idx.q", lambda: q)
    put(call.trace, layer, "idx.w", lambda: w)
    put(call.trace, layer, "idx.topk", lambda: chosen)
    put_pool(call.trace, layer, shared, entries.visible, config)


def entries_of(layer, call):
    """The entries of the layer's KV source, for the queries of the call. Entry j is visible from
    the token on that closes its group.
    """
    batch, here, cache, ratio = call.batch, call.here, call.cache, layer.ratio
    visible, reach = ((b.positions + 1) // ratio for b in (here, batch))
    spans = [(int(batch.order[rows.start]), rows) for _, rows, _, _ in batch.segments()]
    keys, per_page = cache.index[layer.kv_source], cache.page_tokens // ratio
    return Entries(keys, call.pages, per_page, here.order, visible, spans, reach)


def global_rows_of(layer, call):
    """What this layer reads of the past: pool of main KV records, and rows (T, K) per query."""
    cache = call.cache
    if layer.mode == "swa":
        return cache.no_records(len(call.batch.ids))
    entries, per_page = call.shared.selected[layer.index_source], cache.page_tokens // layer.ratio
    rows = paged_rows(entries, call.pages, call.here.order[:, None], per_page)
    return cache.main_kv[layer.kv_source], rows
