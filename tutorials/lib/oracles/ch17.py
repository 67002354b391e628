"""Chapter 17: answers come from dsv41.train, not from the chapter's own code."""

import numpy as np

from dsv41.quant import FLOAT32, WEIGHT_FP4
from dsv41.train.mhc import sinkhorn_backward
from dsv41.train.ops import linear_backward
from dsv41.train.sparse_attn import sparse_attn_backward

from ..page import Exercise


def _records_gradient(D, q, records, rows, sink):
    nobody = np.zeros((0, records.shape[1])), np.zeros((len(rows), 0), int)
    return sparse_attn_backward(D, q, records, rows, *nobody, sink, FLOAT32)[1]


def _reads(rng):
    for tokens, heads, count, width in ((1, 1, 2, 2), (3, 2, 4, 3), (6, 4, 5, 4), (9, 2, 3, 5)):
        q, D = rng.standard_normal((2, tokens, heads, 6))
        records = rng.standard_normal((count, 6)).astype(np.float32).astype(float)
        rows = rng.integers(-1, count, (tokens, width))
        rows[tokens // 2, 0] = rows[-1, -1] = count - 1  # the last record, which -1 would name too
        yield D, q, records, rows, rng.standard_normal(heads)
        yield D, q, records, np.where(np.arange(tokens)[:, None] == 0, -1, rows), np.zeros(heads)


def _one_round(dB, Z, eps):
    return sinkhorn_backward(dB, Z, 1, eps)


def _rounds(rng):
    for size, eps in ((2, 1e-6), (4, 1e-6), (4, 0.1), (5, 0.5)):
        yield rng.standard_normal((size, size)), 2 * rng.standard_normal((size, size)), eps
    yield rng.standard_normal((4, 4)), 800 * np.eye(4), 0.1  # exp(800) is inf


def _master_step(master, x, target, lr):
    read = WEIGHT_FP4.fake(np.float32(master)).astype(float)
    return master - lr * linear_backward(x @ read.T - target, x, read)[1]


def _steps(rng):
    for tokens, outputs, lr in ((1, 1, 0.5), (4, 3, 0.1), (9, 5, 0.01), (3, 2, 1e-4)):
        master, x = rng.standard_normal((outputs, 32)), rng.standard_normal((tokens, 32))
        yield master, x, rng.standard_normal((tokens, outputs)), lr


EXERCISES = {
    "records_gradient": Exercise(
        _records_gradient,
        blank="return the gradient of every record, summed over queries and heads",
        hint="take rows >= 0 only; a row that a query names twice is two entries of its softmax; "
        "np.add.at adds what [rows] += loses",
        inputs=_reads,
        within=1e-9,
    ),
    "one_round": Exercise(
        _one_round,
        blank="return the gradient by Z",
        hint="undo the division by column sums + eps, then the softmax; subtract the row's maximum "
        "before exp; adding eps in between changes no gradient",
        inputs=_rounds,
        within=1e-9,
    ),
    "master_step": Exercise(
        _master_step,
        blank="return the master behind one step",
        hint="the gradient is made with the FP4 weight, the step is taken by the master; "
        "the result is not rounded",
        inputs=_steps,
        within=1e-9,
    ),
}
