"""Attention in float64, one query at a time: what the kernels' errors are measured against.

Inputs are decoded records and lists of rows as NumPy arrays; nothing is rounded on the way.
"""

import numpy as np


def attention(q, near, near_rows, far, far_rows, sink, positions=None, freqs=None):
    """q (T, H, C), near and far (rows, C) f32 values -> o (T, H, C) float64."""
    out = np.zeros(q.shape)
    for t, query in enumerate(q.astype(np.float64)):
        turned = query if freqs is None else turn(query, positions[t], freqs, 1)
        out[t] = one_query(turned, listed(near, near_rows[t], far, far_rows[t]), sink)
        if freqs is not None:
            out[t] = turn(out[t], positions[t], freqs, -1)
    return out


def listed(near, near_rows, far, far_rows):
    """The records that one query reads, (n, C) float64."""
    kept = near[near_rows[near_rows >= 0]], far[far_rows[far_rows >= 0]]
    return np.concatenate(kept).astype(np.float64)


def one_query(q, kv, sink):
    """q (H, C), kv (n, C) -> (H, C)."""
    if not len(kv):
        return np.zeros_like(q)
    s = q @ kv.T / np.sqrt(q.shape[-1])
    top = np.maximum(s.max(axis=1), sink)[:, None]
    p = np.exp(s - top)
    return p @ kv / (p.sum(axis=1, keepdims=True) + np.exp(sink[:, None] - top))


def turn(x, position, freqs, sign):
    """x (H, C): the last channel pairs turn by sign * position * freqs (a float32 product)."""
    angle = (np.float32(position) * np.asarray(freqs, np.float32)).astype(np.float64)
    split = x.shape[-1] - 2 * len(freqs)
    z = x[..., split::2] + 1j * x[..., split + 1 :: 2]
    z = z * np.exp(sign * 1j * angle)
    out = x.copy()
    out[..., split::2], out[..., split + 1 :: 2] = z.real, z.imag
    return out
