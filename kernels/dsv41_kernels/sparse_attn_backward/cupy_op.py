"""Attention's gradients on a GPU; contract: dsv41.train.sparse_attn.sparse_attn_backward."""

import cupy
import numpy as np

from dsv41.dispatch import block_elements
from dsv41.train import sparse_attn as definitions

from ..arguments import cuda_array
from ..attention import THREADS, Call, few_heads, known
from ..launch import MOST_SHARED, grid, kernel, launch


def sparse_attn_backward(do, q, window, window_rows, global_kv, global_rows, sink, numerics):
    arguments = do, q, window, window_rows, global_kv, global_rows, sink, numerics
    if not fits(q, window_rows, global_rows, numerics):
        return definitions.sparse_attn_backward.definition(*arguments)
    return gradients(do, q, None, None, *arguments[2:])


def fits(q, window_rows, global_rows, numerics):
    """Does the kernel take this call: few heads, known formats, lists that fit?"""
    if not known(q, numerics) or not few_heads(q):
        return False
    width = window_rows.shape[-1] + global_rows.shape[-1]
    return shared_bytes(*q.shape[1:], width, q.shape[2] // 2) <= MOST_SHARED


def gradients(do, q, *rest):
    """dq, dwindow, dglobal, dsink, share of a call that fits; rest as in `rope_sparse_attn`."""
    call, do = Call(q, *rest), cuda_array("do", do, np.float32, shape=q.shape)
    window = len(call.window)
    drecords = cupy.zeros((window + len(call.global_kv), call.channels), q.dtype)
    dq, dsink = cupy.empty_like(call.q), cupy.zeros(call.heads, q.dtype)
    share = cupy.empty(call.global_rows.shape, q.dtype)
    block = max(1, block_elements(call.q) // max(1, call.width * call.channels))
    for begin in range(0, call.tokens, block):
        at = slice(begin, min(begin + block, call.tokens))
        _add_block(call, at, do[at], dq[at], share[at], drecords, dsink)
    return dq, drecords[:window], drecords[window:], dsink, share


def _add_block(call, at, do, dq, share, drecords, dsink):
    """The queries `at`: writes dq and share, adds to drecords and dsink."""
    tokens, heads, width, channels = len(do), call.heads, call.width, call.channels
    begin = cupy.zeros(len(drecords), np.int32)  # where each record's parts begin
    parts = cupy.empty((tokens * width, channels), np.float32)
    dsinks = cupy.empty((tokens, heads), np.float32)

    def run(name, blocks, threads, *arguments, shared=0):
        macros = {**call.macros, "H": heads, "shared": MOST_SHARED if shared else 0}
        function = kernel("sparse_attn_backward", name, **macros)
        launch(function, blocks, threads, arguments, shared)

    entries = *call.lists(at), np.int64(tokens)
    run("count_readers", grid(tokens * width), 256, *entries, begin)
    run("places", 1, 1024, begin, np.int64(len(begin)))
    with call.errors(at.start) as bad:
        results = bad, begin, dq, parts, dsinks, share
        shared = shared_bytes(heads, channels, width, call.pairs)
        run("attend_backward", tokens, THREADS, do, *call.arguments(at), *results, shared=shared)
    sums = parts, begin, drecords, dsinks, dsink, np.int64(tokens)
    run("add_parts", heads + len(drecords), 256, *sums)


def shared_bytes(heads, channels, width, pairs):
    """What `attend_backward` keeps in shared memory, as laid out at its top."""
    padded = max(64, 32 * -(-width // 32))
    floats = padded * (channels + 4 + 2 * heads) + 2 * heads * channels + 12 * heads
    return 4 * floats + 8 * pairs + 12 * padded
