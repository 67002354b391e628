"""How does a query attend to a handful of records out of a million?

Attention is a gather: for each query a list of rows (-1 = empty) into the window records and one
into the global records. The rows are decoded and share one softmax with a learned sink per head:

    p_i = exp(s_i) / (sum_i exp(s_i) + exp(sink_h))        s_i = q_h . K_i / sqrt(C)
    o_h = sum_i p_i K_i                                    K is key and value at once

The sink takes weight but brings no value, so a head can attend to nothing; it is not scaled. The
sum runs over chunks of 64 rows with a running maximum, because the released kernel rounds exp(s -
max) to bf16 inside a chunk before it meets the values, while the denominator keeps float32. A
query without any row gives 0. q is rotated by its position before, o is rotated back after, which
leaves distances only. Source: sparse_attn_kernel in inference/kernel.py; report, sections 2.3,
2.4.4.
"""

import numpy as np

from .dispatch import block_elements, on_host, op
from .formats import contiguous
from .rope import rotate

CHUNK = 64  # rows per softmax chunk, as in the released kernel


@op
def sparse_attn(q, window, window_rows, global_kv, global_rows, sink, numerics):
    """q (T, H, C) f32, window and global_kv (rows, Z) records, window_rows (T, W) and
    global_rows (T, K) int (-1 = empty), sink (H,) f32 -> o (T, H, C) f32, stored as bf16.

    A layer without global KV passes global_rows of shape (T, 0). Rows out of range raise.
    """
    q = contiguous(q)
    tokens, _, channels = q.shape
    _check_rows("window_rows", window_rows, window)
    _check_rows("global_rows", global_rows, global_kv)
    width = window_rows.shape[1] + global_rows.shape[1]
    width += -width % CHUNK
    block = max(1, block_elements(q) // max(1, width * channels))
    out = np.zeros(q.shape, np.float32, like=q)
    for begin in range(0, tokens, block):
        at = slice(begin, begin + block)
        recent = _gather(window, window_rows[at], numerics.window_kv, channels)
        chosen = _gather(global_kv, global_rows[at], numerics.main_kv, channels)
        kv, valid = _joined(recent, chosen, width)
        out[at] = _attend(q[at], kv, valid, sink, numerics)
    return numerics.store(out)


@op
def rope_sparse_attn(
    q, positions, freqs, window, window_rows, global_kv, global_rows, sink, numerics
):
    """`sparse_attn` with q (T, H, C) rotated by positions (T,) before and o rotated back after."""
    q = numerics.store(rotate(q, positions, freqs))
    o = sparse_attn(q, window, window_rows, global_kv, global_rows, sink, numerics)
    return numerics.store(rotate(o, positions, freqs, inverse=True))


def _check_rows(name, rows, records):
    if on_host(rows) and rows.size and int(rows.max()) >= len(records):
        raise IndexError(f"{name}: row {int(rows.max())} of {len(records)} records")


def _gather(records, rows, fmt, channels):
    """-> records of the rows, decoded (t, n, C) f32, and which exist (t, n) bool.

    Each record is decoded once per block of queries, however many of them read it.
    trap: -1 is a legal NumPy index and an empty row may hold NaN bytes, so both are masked here.
    """
    used, where = np.unique(rows, return_inverse=True)
    valid = rows >= 0
    decoded = np.zeros((len(used), channels), np.float32, like=records)
    exists = used >= 0
    decoded[exists] = fmt.decode(records[used[exists]], channels)
    return decoded[where.reshape(rows.shape)], valid


def _joined(recent, chosen, width):
    """Window rows, then global rows, padded with empty rows to `width`."""
    (near, near_ok), (far, far_ok) = recent, chosen
    tokens, n, channels = near.shape
    kv = np.zeros((tokens, width, channels), np.float32, like=near)
    valid = np.zeros((tokens, width), bool, like=near)
    kv[:, :n], valid[:, :n] = near, near_ok
    kv[:, n : n + far.shape[1]], valid[:, n : n + far.shape[1]] = far, far_ok
    return kv, valid


def _attend(q, kv, valid, sink, numerics):
    """q (t, H, C), kv (t, n, C), valid (t, n) -> (t, H, C): online softmax over chunks of rows."""
    scale = np.float32(q.shape[-1] ** -0.5)
    top = np.zeros((*q.shape[:2], 1), np.float32, like=q) - np.float32(1e30)  # running maximum
    total, weighted = np.zeros_like(top), np.zeros_like(q)
    for begin in range(0, kv.shape[1], CHUNK):
        rows, seen = kv[:, begin : begin + CHUNK], valid[:, None, begin : begin + CHUNK]
        s = np.where(seen, (q @ rows.transpose(0, 2, 1)) * scale, np.float32(-np.inf))
        new_top = np.maximum(top, np.max(s, axis=-1, keepdims=True))
        p, decay = np.exp(s - new_top), np.exp(top - new_top)
        total = total * decay + np.sum(p, axis=-1, keepdims=True)
        weighted = weighted * decay + numerics.store(p) @ rows
        top = new_top
    # a query without rows still has top = -1e30: its sink is infinitely heavy, its output 0
    with np.errstate(over="ignore"):
        total = total + np.exp(sink[:, None] - top)
    return weighted / np.where(total == 0, np.float32(1), total)
