"""Attention with both rotations inside; the contract is dsv41.sparse_attn.rope_sparse_attn's."""

from dsv41 import sparse_attn as definitions

from ..sparse_attn.cupy_op import attend, fits


def rope_sparse_attn(
    q, positions, freqs, window, window_rows, global_kv, global_rows, sink, numerics
):
    arguments = q, positions, freqs, window, window_rows, global_kv, global_rows, sink, numerics
    if not fits(q, window_rows, global_rows, numerics):
        return definitions.rope_sparse_attn.definition(*arguments)
    return attend(*arguments)
