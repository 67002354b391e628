"""Attention with both rotations inside; the contract is dsv41.sparse_attn.rope_sparse_attn's."""

import cupy
import numpy as np

from dsv41 import sparse_attn as definitions

from ..arguments import require
from ..attention import FORMATS, Call
from ..launch import MOST_SHARED, kernel, launch, processors
from ..sparse_attn.cupy_op import choose

HEADS, CHANNELS = 64, 512  # the sizes of the released model, for which v3 to v8 are made
MOST_ROWS = 768  # of a token in v5 and v8
CLUSTER = 9  # SMs counted for a cluster of v5: 16 in one GPC hold two, and its rest is lost
QUAD = 4.4  # the same for a cluster of four of v8: 132 hold 30
DESK_BYTES = 62_720  # as cluster.cuh asserts
QUAD_DESK_BYTES = 222_528  # as quad.cuh asserts


def rope_sparse_attn(
    q, positions, freqs, window, window_rows, global_kv, global_rows, sink, numerics
):
    arguments = q, positions, freqs, window, window_rows, global_kv, global_rows, sink, numerics
    version = fastest if fits(q, window_rows, global_rows, numerics) else None
    version = version or choose(q, window_rows, global_rows, numerics)
    return (version or definitions.rope_sparse_attn.definition)(*arguments)


def fits(q, window_rows, global_rows, numerics):
    """Is it a call of the released model: 64 heads of 512 channels, stored records, bf16?"""
    formats = FORMATS.get(numerics.window_kv), FORMATS.get(numerics.main_kv), numerics.bf16
    if q.dtype != np.float32 or q.shape[1:] != (HEADS, CHANNELS) or formats != (1, 2, True):
        return False
    width = window_rows.shape[-1] + global_rows.shape[-1]
    return pipeline_bytes(width, CHANNELS // 2) <= MOST_SHARED


def tiles(q, *rest, heads=None):
    """v3; `heads` of a token in a block: 64, or 16 where that leaves multiprocessors idle."""
    call = Call(q, *rest)
    heads = heads or (HEADS if 2 * call.tokens >= processors() else 16)
    out = cupy.empty_like(call.q)
    function = kernel("rope_sparse_attn", "tiles", shared=MOST_SHARED, **call.macros, HEADS=heads)
    blocks, shared = call.tokens * HEADS // heads, tiles_bytes(heads, call.width, call.pairs)
    with call.errors() as bad:
        launch(function, blocks, 256, (*call.arguments(), bad, out), shared)
    return out


def pipeline(q, *rest):
    """v4, a block per token."""
    call = Call(q, *rest)
    out = cupy.empty_like(call.q)
    function = kernel("rope_sparse_attn", "pipeline", shared=MOST_SHARED, **call.macros)
    shared = pipeline_bytes(call.width, call.pairs)
    with call.errors() as bad:
        launch(function, call.tokens, 384, (*call.arguments(), bad, out), shared)
    return out


def cluster(q, *rest, adders=None):
    """v5, four clusters of 16 blocks per token, for lists of up to 768 rows.

    `adders` of the 16 add up values: 8 for one token, else 16, of which two share a multiprocessor.
    """
    call = Call(q, *rest)
    require(call.width <= MOST_ROWS, f"rows: {MOST_ROWS} of a token at most, got {call.width}")
    adders = adders or (8 if call.tokens == 1 else 16)
    out = cupy.empty_like(call.q)
    macros = call.macros | ({"VALUE_BLOCKS": adders} if adders != 16 else {})
    function = kernel("rope_sparse_attn", "cluster", shared=MOST_SHARED, cluster=16, **macros)
    shared = cluster_bytes(call.width, adders)
    with call.errors() as bad:
        launch(function, 64 * call.tokens, 544, (*call.arguments(), bad, out), shared)
    return out


def relay(q, *rest, split=None):
    """v6; `split` blocks per token: 1, or 2 or 4 where that many find a multiprocessor each."""
    call = Call(q, *rest)
    split = split or next(n for n in (4, 2, 1) if n == 1 or n * call.tokens <= processors())
    out = cupy.empty_like(call.q)
    macros = call.macros | ({"SPLIT": split} if split > 1 else {})
    function = kernel("rope_sparse_attn", "relay", shared=MOST_SHARED, **macros)
    threads, shared = 512 if split == 4 else 384, relay_bytes(call.width, call.pairs)
    with call.errors() as bad:
        launch(function, split * call.tokens, threads, (*call.arguments(), bad, out), shared)
    return out


def resident(q, *rest):
    """v7, a block per multiprocessor that takes one token after the other."""
    call = Call(q, *rest)
    out = cupy.empty_like(call.q)
    function = kernel("rope_sparse_attn", "resident", shared=MOST_SHARED, **call.macros)
    # trap: with fewer than three chunks a token, makers would be two tokens ahead
    blocks = min(call.tokens, processors()) if call.width > 128 else call.tokens
    shared = resident_bytes(call.width, call.pairs)
    with call.errors() as bad:
        arguments = *call.arguments(), bad, out, np.int32(call.tokens)
        launch(function, blocks, 512, arguments, shared)
    return out


def quad(q, *rest, sharers=None):
    """v8, a cluster of `sharers` blocks per token, for lists of up to 768 rows: four, or two where
    such of four would not all run at once.
    """
    call = Call(q, *rest)
    require(call.width <= MOST_ROWS, f"rows: {MOST_ROWS} of a token at most, got {call.width}")
    sharers = sharers or (4 if call.tokens * QUAD <= processors() else 2)
    out = cupy.empty_like(call.q)
    macros = call.macros | ({"SHARERS": sharers} if sharers != 4 else {})
    function = kernel("rope_sparse_attn", "quad", shared=MOST_SHARED, **macros)
    shared = QUAD_DESK_BYTES + 8 * call.pairs
    with call.errors() as bad:
        launch(function, sharers * call.tokens, 512, (*call.arguments(), bad, out), shared)
    return out


def fastest(q, positions, freqs, window, window_rows, *rest):
    """v5 while its clusters run at once, v8 while its clusters do, v6 where those of four blocks do
    not and its own blocks still do, v7 beyond, and what its shared memory allows for wider lists:
    same bits.

    On an H200 v5 and v8 were seen to cross at four tokens, clusters of four found a place together
    30 times and of two 66 times, and for 32 tokens v6 takes no more than those of two.
    """
    width = window_rows.shape[-1] + rest[1].shape[-1]
    few = 2 * len(q) <= processors()
    version = relay if few else resident
    if resident_bytes(width, CHANNELS // 2) > MOST_SHARED:
        version = relay if relay_bytes(width, CHANNELS // 2) <= MOST_SHARED else pipeline
    if width <= MOST_ROWS:
        if 4 * len(q) * CLUSTER <= processors():
            version = cluster
        elif len(q) * QUAD <= processors() or (few and 4 * len(q) > processors()):
            version = quad
    return version(q, positions, freqs, window, window_rows, *rest)


def tiles_bytes(heads, width, pairs):
    """What `tiles` keeps in shared memory, as laid out at its top."""
    padded = 64 * -(-width // 64)
    queries, keys, raw = 1024 * heads, 1024 * 64, 528 * 64
    scores, weights, shrink = 2 * heads * 72 * 4, heads * 128, heads * 4
    return queries + keys + raw + scores + weights + shrink + 8 * pairs + 8 * padded


def pipeline_bytes(width, pairs):
    """What `pipeline` keeps in shared memory, as laid out at its top."""
    padded = 64 * -(-width // 64)
    queries, keys, weights, shrink = 1024 * 64, 2 * 1024 * 64, 64 * 128, 64 * 4
    return queries + keys + weights + shrink + 8 * pairs + 8 * padded + padded // 8


def relay_bytes(width, pairs):
    """What `relay` keeps in shared memory, as laid out at its top."""
    padded = 64 * -(-width // 64)
    queries, keys, weights = 1024 * 64, 2 * 1024 * 64, 2 * 1024 * 11
    return queries + keys + weights + 8 * pairs + 8 * padded + padded // 8


def resident_bytes(width, pairs):
    """What a block of `resident` keeps in shared memory, as laid out at its top."""
    padded = 64 * -(-width // 64)
    queries, keys, weights, flags, factors = 1024 * 64, 2 * 1024 * 64, 2 * 1024 * 9, 8, 64 * 4
    return queries + keys + weights + flags + factors + 16 * pairs + 8 * padded + padded // 4


def cluster_bytes(width, adders):
    """What a block of `cluster` keeps in shared memory: a Desk, and values of its channels."""
    chunks = max(1, -(-width // 64))
    return DESK_BYTES + 64 * chunks * 1024 // adders
