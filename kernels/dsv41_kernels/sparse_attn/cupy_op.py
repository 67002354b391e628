"""Attention on a GPU; the contract is dsv41.sparse_attn.sparse_attn's docstring."""

import cupy
import numpy as np

from dsv41 import sparse_attn as definitions

from ..attention import SHARED_BYTES, THREADS, Reads, array, launch, rotation, small, small_kernel


def sparse_attn(q, window, window_rows, global_kv, global_rows, sink, numerics):
    arguments = q, window, window_rows, global_kv, global_rows, sink, numerics
    if not fits(q, window_rows, global_rows, numerics):
        return definitions.sparse_attn.definition(*arguments)
    return attend(q, None, None, *arguments[1:])


def fits(q, window_rows, global_rows, numerics):
    """Does v1 take this call: few heads, known formats, lists that fit into shared memory?"""
    if not small(q, numerics) or window_rows.ndim != 2 or global_rows.ndim != 2:
        return False
    width = window_rows.shape[1] + global_rows.shape[1]
    return shared_bytes(*q.shape[1:], width, q.shape[2] // 2) <= SHARED_BYTES


def attend(q, positions, freqs, window, window_rows, global_kv, global_rows, sink, numerics):
    """Attention of queries that fit, rotated where freqs is not None."""
    tokens, heads, channels = q.shape
    q, sink = array("q", q, np.float32, q.shape), array("sink", sink, np.float32, (heads,))
    reads = Reads(tokens, channels, window, window_rows, global_kv, global_rows, numerics)
    turn = rotation(positions, freqs, tokens, channels)
    out = cupy.empty_like(q)
    if out.size:
        shared = shared_bytes(heads, channels, reads.width, int(turn[2]))
        function = small_kernel("sparse_attn", "attend", q, numerics)
        launch(function, tokens, THREADS, (q, *turn, *reads.arguments(), sink, out), shared)
    return out


def shared_bytes(heads, channels, width, pairs):
    """What `attend` keeps in shared memory, as laid out at its top."""
    chunks = max(1, -(-width // 64))
    padded = 64 * chunks
    floats = padded * (channels + 4 + heads) + heads * channels + 4 * heads * (chunks + 1)
    return 4 * floats + 8 * pairs + 8 * padded
