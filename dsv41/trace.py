"""What happened inside? Named intermediates of one call, collected in the caller's dict.

`forward(..., trace={})` fills the dict with arrays under the names of the reference data:
"L02.cmp.latent", "L05.cand.mask", "L04.x_out", "final_x". With trace=None nothing is computed or
kept. A dense (T, N) array, such as the scores, exists here only, because somebody asked to look at
it.
"""

import numpy as np

from .dispatch import to_host
from .indexer import block_scores


def put(trace, layer, name, make):
    """trace[name] = make(), prefixed with the layer's number; nothing when trace is None."""
    if trace is not None:
        kind = "M" if layer is not None and layer.half == "draft" else "L"
        prefix = "" if layer is None else f"{kind}{layer.index:0{2 if kind == 'L' else 1}d}."
        trace[prefix + name] = to_host(make()).copy()


def watch_scores(trace, layer, visible):
    """Begin "idx.score" (T, N) for queries that see `visible` (T,) entries, all -inf -> what writes
    one block of queries into it; None when trace is None.
    """
    if trace is None:
        return None
    put(trace, layer, "idx.score", lambda: _nothing_seen(visible))
    return lambda at, scores, entries: put_scores(trace, layer, at, visible, scores, entries)


def _nothing_seen(visible):
    return np.full((len(visible), int(visible.max())), -np.inf, np.float32)


def put_scores(trace, layer, at, visible, scores, entries):
    """Write one query block into "idx.score": -inf stays where not visible or outside the pool."""
    scores, visible = to_host(scores), to_host(visible[at])
    entries = np.arange(scores.shape[1])[None] if entries is None else to_host(entries)
    entries = np.broadcast_to(entries, scores.shape)
    row, column = np.nonzero((entries >= 0) & (entries < visible[:, None]))
    table = trace[f"L{layer.index:02d}.idx.score"]
    table[at.start + row, entries[row, column]] = scores[row, column]


def put_pool(trace, layer, shared, visible, config):
    """Write "cand.block_score" and "cand.mask" (T, N) of the layer that publishes the pool."""
    if trace is None or layer.candidates != "publish":
        return
    size = config.candidate_block_size
    scores, visible = trace[f"L{layer.index:02d}.idx.score"], to_host(visible)
    put(trace, layer, "cand.block_score", lambda: block_scores(scores, visible, size))
    kept = np.zeros((len(visible), -(-scores.shape[1] // size) + 1), bool)
    np.put_along_axis(kept, to_host(shared.pool), True, axis=1)  # -1 lands in the spare last column
    mask = np.repeat(kept[:, :-1], size, axis=1)[:, : scores.shape[1]]
    put(trace, layer, "cand.mask", lambda: mask)
