"""How does a gradient pass back through a norm, a linear map, a gate?

With g for the gradient of the loss by a function's result, the gradients by its inputs are

    rmsnorm        dx = r (g w - n mean(g w n))     dw = sum_t g n       n = x r, r = 1 / rms(x)
    linear         dx = g W                         dW = g^T x
    swiglu         da = g u silu'(a)                du = g silu(a)       0 where the clamp cuts
    sqrt_softplus  dx = g sigmoid(x) / (2 y)

Rounding has derivative zero almost everywhere, which would stop all learning, so it is passed
straight through: the gradient by the rounded number counts as the gradient by the number. That
holds for bf16 storage, for the quantisers of activations and caches and for FP8 and FP4 weights.
A block's scale follows its largest member, so blocks scaled by powers of two cut nothing off; only
what is outside a format's whole range gets no gradient (`straight_through`). Products use the
rounded inputs, as the forward did. Source: the chain rule; for rounding, Bengio et al. 2013.
"""

import math

import numpy as np

from ..dispatch import op
from ..formats import E4M3
from ..ops import dense, sigmoid, silu, sqrt_softplus


@op
def rmsnorm_backward(dy, x, weight, eps):
    """dy, x (..., C), weight (C,) -> dx (..., C), dweight (C,)."""
    r = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    normed, g = x * r, dy * weight
    dx = r * (g - normed * np.mean(g * normed, axis=-1, keepdims=True))
    return dx, _over_rows(dy * normed)


def linear_backward(dy, x, weight):
    """dy (T, N), x (T, K), weight (N, K) -> dx (T, K), dweight (N, K)."""
    return dy @ dense(weight), dy.T @ x


def linear_fp8_backward(dy, x, weight, numerics):
    """The same for `linear_fp8`, which rounds x first; MXFP8 covers every x, so nothing is cut."""
    return linear_backward(dy, numerics.activation.fake(x), weight)


def straight_through(dy, x, fmt):
    """The gradient by x of fmt.fake(x) or of the records fmt.encode(x): dy, 0 beyond the range.

    x, dy (..., C). Main KV ends at 448 * 6. What the E4M3 rounding of a scale takes from a block's
    largest members, at most a sixteenth, counts as rounding.
    """
    if getattr(fmt, "scale", "e8m0") == "e8m0":  # reaches beyond every finite activation
        return dy
    largest = fmt.element.largest * E4M3.largest
    return np.where(np.abs(x) <= largest, dy, 0)


def sigmoid_slope(x):
    """x -> sigmoid'(x)."""
    s = sigmoid(x)
    return s * (1 - s)


def silu_slope(x):
    """x -> silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x)))."""
    s = sigmoid(x)
    return s * (1 + x * (1 - s))


@op
def swiglu_backward(dy, gate, up, limit):
    """dy, gate, up (..., F) -> dgate, dup (..., F). A value on the limit itself still moves."""
    a, u = gate, up
    if limit:
        a, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    dgate, dup = dy * u * silu_slope(a), dy * silu(a)
    if limit:
        dgate = np.where(gate <= limit, dgate, 0)
        dup = np.where(np.abs(up) <= limit, dup, 0)
    return dgate, dup


def sqrt_softplus_backward(dy, x):
    """dy, x (...) -> dx. Below -20 y is e^(x/2), and sigmoid(x) / y would be 0 / 0 in the end."""
    y = sqrt_softplus(x)
    low = x < -20
    return dy * np.where(low, 0.5 * y, sigmoid(x) / (2 * np.where(low, 1, y)))


def sum_rows(values, rows):
    """Add up the values of equal row numbers: the gradient of a gather.

    values (n, C), rows (n,) int, negative ones left out -> numbers (u,) ascending, sums (u, C).
    Sorted, each row's values are one run, added from its first to its last, so the result does not
    depend on chance; np.add.at would be slow here, and on a GPU it adds in any order.
    """
    order = np.argsort(rows, kind="stable")
    order = order[rows[order] >= 0]
    numbers, first = np.unique(rows[order], return_index=True)
    return numbers, segment_sums(values[order], first)


@op
def segment_sums(values, first):
    """values (n, C), first (u,) int ascending from 0: where each segment begins -> (u, C) sums.

    Rows are added from the first to the last.
    """
    return np.add.reduceat(values, first, axis=0)


def add_rows(total, values, rows):
    """total[rows] += values (..., C) for rows (...) int that may repeat; negative ones are none."""
    numbers, sums = sum_rows(values.reshape(rows.size, values.shape[-1]), rows.ravel())
    total[numbers] += sums


def add_grads(*branches):
    """Sum of nested dicts of gradients; a leaf may be missing in some of them."""
    total = {}
    for branch in branches:
        for key, value in branch.items():
            if key not in total:
                total[key] = value
            elif isinstance(value, dict):
                total[key] = add_grads(total[key], value)
            else:
                total[key] = total[key] + value
    return total


def _over_rows(x):
    """x (..., C) -> (C,): the sum over all axes but the last."""
    return np.sum(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), axis=0)
