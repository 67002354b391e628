"""The router on a GPU; the contract is dsv41.moe.route's docstring."""

import cupy
import numpy as np

from dsv41.ops import matmul_rows

from ..errors import bad_values
from ..launch import grid, kernel


def route(x, p, is_image, experts, factor, normalize, numerics):
    logits = cupy.ascontiguousarray(matmul_rows(x, p["weight"], numerics))
    tokens, count = logits.shape
    if experts > count:
        raise ValueError(f"experts: {experts} to choose, {count} there")
    biased = cupy.empty_like(logits)
    chosen = cupy.empty((tokens, experts), np.int64)
    weight = cupy.empty((tokens, experts), np.float32)
    if tokens:
        sizes = np.int64(tokens), np.int32(count), np.int32(experts)
        biases = p["bias"], p.get("bias_vl", np.uintp(0)), cupy.asarray(is_image, bool)
        rest = *sizes, np.int32(bool(normalize)), np.float32(factor)
        with bad_values(_describe, logits) as word:
            arguments = logits, *biases, chosen, weight, biased, word, *rest
            kernel("route", "route")(grid(tokens), (256,), arguments)
    return chosen, weight, biased


def _describe(token, kind):
    return f"x: the router's scores of token {token} are NaN"
