"""Which entries does each query of a call choose, when every request has entries of its own?

The queries of a call belong to several requests, and so do the index keys in a source's pool. A
query sees the first `visible` entries of its own request, in the pages of that request:

    query t -> request r = order[t] -> entry j -> row pages[r, j // per_page] * per_page
                                                      + j % per_page
               scores of j < visible[t] -> the best k   (indexer.py)

`choose_anywhere` scores all that a query sees, and is what grows with the context; it ranks the
blocks of a candidate pool on the way. `choose_in_pool` reads only the keys of each query's pool.
Both run over blocks of queries of one request, so that no (T, N) array exists. Whoever passes
`watch` is shown the scores of every block: watch(rows of the queries, scores (t, n), and the entry
numbers (t, n) or None for all from 0). Source: Indexer in the released inference/model.py.
"""

from dataclasses import dataclass

import numpy as np

from . import indexer
from .cache import paged_rows
from .dispatch import block_elements, op


@dataclass(frozen=True)
class Entries:
    """The entries of one KV source that the queries of a call may choose from.

    keys (rows, Z): index records of all requests, in pages of per_page. pages (R, n) int: page
    numbers of each request. order, visible (T,) int: each query's request, and how many of its
    entries it sees. spans: (request, slice of its queries) and reach (T,), `visible`, in CPU
    memory.
    """

    keys: np.ndarray
    pages: np.ndarray
    per_page: int
    order: np.ndarray
    visible: np.ndarray
    spans: list
    reach: np.ndarray

    def rows(self, request, entries):
        """Rows in `keys` of a request's entry numbers >= 0."""
        return paged_rows(entries, self.pages, request, self.per_page)

    def query_blocks(self, most, elements):
        """Cut each request's queries so that elements(n), what a query of n entries takes, stays
        below `most` together -> (request, rows of queries, entries seen by the last of them).
        """
        for request, rows in self.spans:
            step = max(1, most // max(1, elements(int(self.reach[rows.stop - 1]))))
            for begin in range(rows.start, rows.stop, step):
                at = slice(begin, min(begin + step, rows.stop))
                seen = int(self.reach[at.stop - 1])
                if seen:
                    yield request, at, seen


@op
def choose_anywhere(q, w, entries, k, pool, numerics, watch=None):
    """The k best of all entries that each query sees.

    q (T, I, J) f32, w (T, I) f32, entries Entries -> (T, k) int64, ascending, -1 padded, and with
    pool = (entries per block, blocks to keep) the block numbers (T, B) int64, else None.
    """
    chosen = np.zeros((len(q), k), np.int64, like=q) - 1
    blocks = None if pool is None else np.zeros((len(q), pool[1]), np.int64, like=q) - 1
    most, heads = block_elements(q), q.shape[1]
    for request, at, seen in entries.query_blocks(most, lambda n: n * heads):
        keys = entries.keys[entries.rows(request, np.arange(seen, like=entries.pages))]
        scores, visible = indexer.index_scores(q[at], w[at], keys, numerics), entries.visible[at]
        chosen[at] = indexer.index_topk(scores, visible, k)
        if pool is not None:
            blocks[at] = indexer.candidate_blocks(scores, visible, *pool)
        if watch is not None:
            watch(at, scores, None)
    return chosen, blocks


@op
def choose_in_pool(q, w, entries, blocks, block_size, k, numerics, watch=None):
    """The k best of the entries in each query's blocks (T, B) int64, -1 padded -> (T, k) int64."""
    chosen = np.zeros((len(q), k), np.int64, like=q) - 1
    listed, width = blocks.shape[1] * block_size, max(q.shape[1:])
    most = block_elements(q)
    for request, at, seen in entries.query_blocks(most, lambda n: min(n, listed) * width):
        used = -(-seen // block_size)  # no query keeps more blocks than that
        inside = indexer.pool_entries(blocks[at][:, :used], block_size)
        readable = np.clip(inside, 0, seen - 1)  # the newest block may reach past the last key
        keys = entries.keys[entries.rows(request, readable)]
        scores = indexer.index_scores(q[at], w[at], keys, numerics)
        chosen[at] = indexer.pool_topk(scores, inside, entries.visible[at], k)
        if watch is not None:
            watch(at, scores, inside)
    return chosen
