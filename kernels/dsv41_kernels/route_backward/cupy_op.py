"""The router's gradient on a GPU; the contract is dsv41.train.moe.route_backward's docstring."""

import cupy
import numpy as np

from dsv41.ops import matmul_rows
from dsv41.train.ops import linear_backward

from ..launch import grid, kernel


def route_backward(dweight, dscores, x, p, chosen, factor, normalize, numerics):
    logits = cupy.ascontiguousarray(matmul_rows(x, p["weight"], numerics))
    dlogits, (tokens, experts) = cupy.empty_like(logits), logits.shape
    if tokens:
        dweight, dscores = (cupy.ascontiguousarray(a, np.float32) for a in (dweight, dscores))
        sizes = np.int64(tokens), np.int32(experts), np.int32(chosen.shape[1])
        rest = *sizes, np.int32(bool(normalize)), np.float32(factor)
        arguments = dweight, dscores, logits, cupy.ascontiguousarray(chosen, np.int64), dlogits
        kernel("route_backward", "route_backward")(grid(tokens), (256,), (*arguments, *rest))
    dx, dgate = linear_backward(dlogits, x, p["weight"])
    return dx, {"weight": dgate}
