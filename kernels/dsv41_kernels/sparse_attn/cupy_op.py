"""Attention on a GPU; the contract is dsv41.sparse_attn.sparse_attn's docstring."""

import cupy
import numpy as np

from dsv41 import sparse_attn as definitions

from ..attention import THREADS, Call, few_heads, known
from ..launch import MOST_SHARED, kernel, launch


def sparse_attn(q, window, window_rows, global_kv, global_rows, sink, numerics):
    arguments = q, window, window_rows, global_kv, global_rows, sink, numerics
    version = choose(q, window_rows, global_rows, numerics)
    if version is None:
        return definitions.sparse_attn.definition(*arguments)
    return version(q, None, None, *arguments[1:])


def choose(q, window_rows, global_rows, numerics):
    """The version for such arguments, None where only the definition takes them."""
    if not known(q, numerics):
        return None
    width = window_rows.shape[-1] + global_rows.shape[-1]
    small = few_heads(q) and shared_bytes(*q.shape[1:], width, q.shape[2] // 2) <= MOST_SHARED
    return attend if small else plain


def plain(q, *rest):
    """v1; rest as in `rope_sparse_attn`, freqs None leaves q and o as they are."""
    call = Call(q, *rest)
    out = cupy.empty_like(call.q)
    function = kernel("sparse_attn", "plain", **call.macros)
    with call.errors() as bad:
        arguments = *call.arguments(), bad, out, np.int32(call.heads)
        launch(function, call.tokens * call.heads, THREADS, arguments)
    return out


def attend(q, *rest):
    """v2, for few heads."""
    call = Call(q, *rest)
    out = cupy.empty_like(call.q)
    function = kernel("sparse_attn", "attend", shared=MOST_SHARED, **call.macros, H=call.heads)
    shared = shared_bytes(call.heads, call.channels, call.width, call.pairs)
    with call.errors() as bad:
        launch(function, call.tokens, THREADS, (*call.arguments(), bad, out), shared)
    return out


def shared_bytes(heads, channels, width, pairs):
    """What `attend` keeps in shared memory, as laid out at its top."""
    chunks = max(1, -(-width // 64))
    padded = 64 * chunks
    floats = padded * (channels + 4 + heads) + heads * channels + 4 * heads * (chunks + 1)
    return 4 * floats + 8 * pairs + 8 * padded
