"""Score and select on a GPU; the contract is dsv41.selection.choose_anywhere's docstring."""

import cupy
import numpy as np

from dsv41.selection import choose_anywhere as text

from ..candidate_blocks.cupy_op import candidate_blocks
from ..index_scores.cupy_op import PREFILL
from ..index_topk.cupy_op import index_topk
from ..indexing import (
    RING_BYTES,
    RUN,
    WARPS,
    entry_arrays,
    key_array,
    keys_per_block,
    macros,
    on_tensor_cores,
    query_arrays,
)
from ..launch import kernel, launch

AT_ONCE = 144 * 1024  # bytes of scores in shared memory, beside 75 KB of keys in v2
MOST_SCORES = 1 << 28  # that choose_from_scores keeps in memory at once, 1 GB


def choose_anywhere(q, w, entries, k, pool, numerics, watch=None):
    known, room = macros(q, numerics), entries.pages.shape[1] * entries.per_page
    longest = min(room, int(entries.reach.max(initial=0)))
    fast = known is not None and on_tensor_cores(known) and entries.per_page % RUN == 0
    # prefill goes request by request, since index_scores unpacks a key once for many queries
    prefill = fast and len(q) >= PREFILL * len(entries.spans)
    fits = known is not None and _shared(longest, pool) <= AT_ONCE
    if watch is not None or prefill or not (fast or fits):
        return text.definition(q, w, entries, k, pool, numerics, watch)
    arrays = (*query_arrays(q, w), key_array(entries.keys, q.shape[2], numerics))
    arrays = (*arrays, *entry_arrays(entries, len(q)))
    if fast:
        return choose_from_scores(arrays, entries.per_page, longest, k, pool, known)
    staged = known["PACKED"] == 0 and known["HEADS"] * known["CHANNELS"] <= 128
    name = "choose_v2" if staged else "choose_v1"
    return choose_at_once(arrays, entries.per_page, longest, k, pool, known, name)


def choose_at_once(arrays, per_page, longest, k, pool, known, name):
    """arrays: q, w, keys, pages, order, visible. One launch."""
    (size, budget), tokens = pool or (1, 0), len(arrays[0])
    chosen, blocks = (cupy.empty((tokens, n), cupy.int64) for n in (k, budget))
    sizes = arrays[3].shape[1], per_page, k, size, budget, longest
    run = kernel("choose_anywhere", name, shared=AT_ONCE, **known)
    shared = _shared(longest, pool)
    launch(run, tokens, 128, (*arrays, chosen, blocks, *map(np.int32, sizes)), shared)
    return chosen, blocks if budget else None


def choose_from_scores(arrays, per_page, longest, k, pool, known, scoring="scores_v4"):
    """The same by a scoring launch and those of index_topk, for as many queries as fit at once."""
    q, w, keys, pages, *per_query = arrays
    longest = -(-longest // 8) * 8  # rows begin on 16 bytes and hold whole blocks of 8
    sizes = per_page, longest, known, scoring
    step, parts = max(1, MOST_SCORES // max(1, longest)), []
    for begin in range(0, max(1, len(q)), step):
        at = slice(begin, begin + step)
        order, visible = (x[at] for x in per_query)
        scores = paged_scores((q[at], w[at], keys, pages, order, visible), *sizes)
        blocks = None if pool is None else candidate_blocks(scores, visible, *pool)
        parts.append((index_topk(scores, visible, k), blocks))
    if len(parts) == 1:
        return parts[0]
    chosen, blocks = zip(*parts, strict=True)
    return cupy.concatenate(chosen), None if pool is None else cupy.concatenate(blocks)


def paged_scores(arrays, per_page, longest, known, scoring):
    """(T, longest) f32, written where visible."""
    tokens = len(arrays[0])
    scores = cupy.empty((tokens, longest), np.float32)
    chunk = keys_per_block(tokens * longest)
    sizes = arrays[3].shape[1], per_page, longest, chunk
    run = kernel("choose_anywhere", scoring, shared=RING_BYTES, **known)
    blocks = tokens * -(-longest // chunk)
    launch(run, blocks, 32 * WARPS, (*arrays, scores, *map(np.int32, sizes)), RING_BYTES)
    return scores


def _shared(longest, pool):
    """Bytes of shared memory that v1 needs for a query that sees `longest` entries."""
    return 4 * (longest + (-(-longest // pool[0]) if pool else 0))
