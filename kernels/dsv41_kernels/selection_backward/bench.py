"""The index loss of a training step's packed documents, at the miniature's sizes."""

import cupy
import numpy as np

from dsv41.quant import FLOAT32
from dsv41.train.indexer import selection_backward as text

from ..bench import Case
from ..choose_anywhere.cupy_op import choose_anywhere
from ..indexing_bench import float_rows, packed_documents, queries
from .cupy_op import selection_backward

OP, K = "selection_backward", 64


def cases(quick=False):
    documents, length = (2, 128) if quick else (6, 4096)
    tokens = documents * length
    entries = packed_documents(float_rows(tokens, 32), documents, length)
    q, w = queries(tokens, 4, 32, FLOAT32)
    chosen, _ = choose_anywhere(q, w, entries, K, None, FLOAT32)
    rows = cupy.where(chosen < 0, -1, chosen + entries.order[:, None] * length)
    attention = cupy.where(rows < 0, 0, cupy.exp(float_rows(tokens, K))).astype(np.float32)
    arguments = q, w, entries.keys, rows, attention, 1 / tokens, FLOAT32
    for name, function in (("v1", selection_backward), ("cupy text", text.definition)):
        call = lambda f=function: f(*arguments)  # noqa: E731
        yield Case(
            op=OP,
            version=name,
            shape=f"training {documents} x {length}, 4 x 32, top-{K}",
            call=call,
            check=lambda c=call: check(arguments, c()),
            bytes=2 * q.nbytes + 2 * w.nbytes + 2 * entries.keys.nbytes + rows.nbytes * 3 // 2,
            flops=6 * tokens * K * 4 * 32,
        )


def check(arguments, got):
    """Against the definition in CPU memory, in float64 -> the largest error of a gradient over its
    largest value.
    """
    wide = [a.get() for a in arguments[:5]]
    wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in wide]
    want, worst = text.definition(*wide, *arguments[5:]), 0.0
    for ours, theirs in zip(want, got, strict=True):
        error = np.abs(ours - theirs.get()).max() / np.abs(ours).max()
        worst = max(worst, float(error))
    assert worst < 2e-5
    return worst
