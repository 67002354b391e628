"""Attention's gradients on a GPU; contract: dsv41.train.sparse_attn.sparse_attn_backward."""

import cupy
import numpy as np

from dsv41.dispatch import block_elements
from dsv41.train import sparse_attn as definitions

from ..attention import SHARED_BYTES, THREADS, Reads, array, launch, rotation, small, small_kernel

OP = "sparse_attn_backward"


def sparse_attn_backward(do, q, window, window_rows, global_kv, global_rows, sink, numerics):
    arguments = do, q, window, window_rows, global_kv, global_rows, sink, numerics
    if not fits(q, window_rows, global_rows, numerics):
        return definitions.sparse_attn_backward.definition(*arguments)
    return gradients(do, q, None, None, *arguments[2:])


def fits(q, window_rows, global_rows, numerics):
    """Does the kernel take this call: few heads, known formats, lists that fit?"""
    if not small(q, numerics) or window_rows.ndim != 2 or global_rows.ndim != 2:
        return False
    width = window_rows.shape[1] + global_rows.shape[1]
    return shared_bytes(*q.shape[1:], width, q.shape[2] // 2) <= SHARED_BYTES


def gradients(do, q, positions, freqs, window, window_rows, global_kv, global_rows, sink, numerics):
    """dq, dwindow, dglobal, dsink, share of a call that fits; rotated where freqs is not None."""
    tokens, heads, channels = q.shape
    do, q = array("do", do, np.float32, q.shape), array("q", q, np.float32, q.shape)
    sink = array("sink", sink, np.float32, (heads,))
    reads = Reads(tokens, channels, window, window_rows, global_kv, global_rows, numerics)
    turn = rotation(positions, freqs, tokens, channels)
    count = len(reads.window) + len(reads.global_kv)
    drecords, dsink = cupy.zeros((count, channels), q.dtype), cupy.zeros(heads, q.dtype)
    dq, share = cupy.empty_like(q), cupy.empty(reads.global_rows.shape, q.dtype)
    block = max(1, block_elements(q) // max(1, reads.width * channels))
    for begin in range(0, tokens, block):
        at = slice(begin, min(begin + block, tokens))
        here = (turn[0][at], *turn[1:]) if freqs is not None else turn
        results = dq[at], share[at], drecords, dsink
        _block(do[at], q[at], here, reads, at, sink, results, numerics)
    split = len(reads.window)
    return dq, drecords[:split], drecords[split:], dsink, share


def _block(do, q, turn, reads, at, sink, results, numerics):
    """One block of queries; drecords and dsink are added to."""
    dq, share, drecords, dsink = results
    (tokens, heads, channels), width = q.shape, reads.width
    begin = cupy.zeros(len(drecords), cupy.int32)  # of each record's parts
    parts = cupy.empty((tokens * width, channels), q.dtype)
    dsinks = cupy.empty((tokens, heads), q.dtype)

    def run(name, blocks, threads, *arguments, shared=0):
        if blocks:
            function = small_kernel(OP, name, q, numerics)
            launch(function, blocks, threads, arguments, shared)

    lists = reads.arguments(at)
    run("count_readers", -(-tokens * width // 256), 256, *lists, np.int64(tokens), begin)
    run("places", 1, 1024, begin, np.int64(len(begin)))
    out = begin, dq, parts, dsinks, share
    shared = shared_bytes(heads, channels, width, int(turn[2]))
    arguments = do, q, *turn, *lists, sink, *out
    run("attend_backward", tokens, THREADS, *arguments, shared=shared)
    sums = parts, begin, drecords, dsinks, dsink, np.int64(tokens)
    run("add_parts", heads + len(drecords), 256, *sums)


def shared_bytes(heads, channels, width, pairs):
    """What `attend_backward` keeps in shared memory, as laid out at its top."""
    padded = max(64, 32 * -(-width // 32))
    floats = padded * (channels + 4 + 2 * heads) + 2 * heads * channels + 12 * heads
    return 4 * floats + 8 * pairs + 12 * padded
