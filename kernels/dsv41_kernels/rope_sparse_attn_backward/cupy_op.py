"""The same with rotations inside; contract: dsv41.train.sparse_attn.rope_sparse_attn_backward."""

from dsv41.train import sparse_attn as definitions

from ..sparse_attn_backward.cupy_op import fits, gradients


def rope_sparse_attn_backward(
    do, q, positions, freqs, window, window_rows, global_kv, global_rows, sink, numerics
):
    reads = window, window_rows, global_kv, global_rows, sink, numerics
    if not fits(q, window_rows, global_rows, numerics):
        return definitions.rope_sparse_attn_backward.definition(do, q, positions, freqs, *reads)
    return gradients(do, q, positions, freqs, *reads)
