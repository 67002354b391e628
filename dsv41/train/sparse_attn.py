"""How does a query tell the records it read, and its sink, what it wanted?

For one query and head, with K_i key and value at once and D the gradient by its output o:

    s_i = c q . K_i     Z = sum_i e^s_i + e^sink     p_i = e^s_i / Z     o = sum_i p_i K_i

    delta   = D . o = sum_i p_i (D . K_i)
    ds_i    = p_i (D . K_i - delta)           a score gains when its value is better than the mean
    dsink   = -(e^sink / Z) delta             the sink brings value 0, and the mean is delta
    dq      = c sum_i ds_i K_i
    dK_i    = p_i D + c ds_i q                once as value, once as key, summed over heads

Many queries read one record, so the dK_i are added up by row number (`add_rows`). The probabilities
are computed again, a query in one piece, and their rounding to bf16 is passed straight through.
`share` is what the heads gave to each selected record; the indexer learns from it (losses.py).
Source: sparse_attn.py, differentiated.
"""

import numpy as np

from ..dispatch import block_elements, op
from ..rope import rotate
from ..sparse_attn import _gather, _joined
from .ops import add_rows
from .rope import rotate_backward


@op
def sparse_attn_backward(do, q, window, window_rows, global_kv, global_rows, sink, numerics):
    """do (T, H, C) the gradient by o, then the inputs of `sparse_attn`
    -> dq (T, H, C), dwindow and dglobal (rows, C) by the decoded records, dsink (H,), and
    share (T, K): the probability of each selected record, mean over heads, 0 for empty rows.
    """
    tokens, _, channels = q.shape
    recent, width = window_rows.shape[1], window_rows.shape[1] + global_rows.shape[1]
    dq, dsink = np.zeros_like(q), np.zeros_like(sink)
    dwindow, dglobal = (np.zeros((len(r), channels), q.dtype, like=q) for r in (window, global_kv))
    share = np.zeros(global_rows.shape, q.dtype, like=q)
    block = max(1, block_elements(q) // max(1, width * channels))
    for begin in range(0, tokens, block):
        at = slice(begin, begin + block)
        near = _gather(window, window_rows[at], numerics.window_kv, channels)
        far = _gather(global_kv, global_rows[at], numerics.main_kv, channels)
        dq[at], dkv, some, p = _attend_backward(do[at], q[at], *_joined(near, far, width), sink)
        dsink += some
        add_rows(dwindow, dkv[:, :recent], window_rows[at])
        add_rows(dglobal, dkv[:, recent:], global_rows[at])
        share[at] = np.mean(p[:, :, recent:], axis=1)
    return dq, dwindow, dglobal, dsink, share


def _attend_backward(do, q, kv, valid, sink):
    """do, q (t, H, C), kv (t, n, C), valid (t, n), sink (H,) -> dq, dkv, dsink, p (t, H, n)."""
    scale = q.shape[-1] ** -0.5
    p, left = _probabilities(q, kv, valid, sink, scale)
    dp = do @ kv.transpose(0, 2, 1)  # (t, H, n)
    delta = np.sum(p * dp, axis=-1, keepdims=True)
    ds = p * (dp - delta) * scale
    dkv = p.transpose(0, 2, 1) @ do + ds.transpose(0, 2, 1) @ q  # summed over heads
    return ds @ kv, dkv, -np.sum(left * delta, axis=(0, 2)), p


def _probabilities(q, kv, valid, sink, scale):
    """-> p (t, H, n), 0 where not valid, and what is left to the sink (t, H, 1)."""
    s = np.where(valid[:, None], (q @ kv.transpose(0, 2, 1)) * scale, -np.inf)
    sink = sink[:, None]
    top = np.maximum(np.max(s, axis=-1, keepdims=True), sink) if s.shape[-1] else sink
    weight, rest = np.exp(s - top), np.exp(sink - top)
    total = np.sum(weight, axis=-1, keepdims=True) + rest
    return weight / total, rest / total


@op
def rope_sparse_attn_backward(
    do, q, positions, freqs, window, window_rows, global_kv, global_rows, sink, numerics
):
    """The same for `rope_sparse_attn`: q before its rotation, do by the output turned back."""
    q = numerics.store(rotate(q, positions, freqs))
    do = rotate_backward(do, positions, freqs, inverse=True)
    dq, *rest = sparse_attn_backward(
        do, q, window, window_rows, global_kv, global_rows, sink, numerics
    )
    return rotate_backward(dq, positions, freqs), *rest
