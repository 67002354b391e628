"""How do the rows of a table of hundreds of millions of n-grams learn?

Only the rows that were looked up get a gradient, so it is kept as (rows, values), each row named
once, its values summed over all places that read it. In front of that lies the gate; with
n(x) = x / rms(x), everything per stream s:

    a = q_w n(X) . k_w n(key) / sqrt(D)      gate = sigmoid( sign(a) sqrt|a| )      X' = X + gate v

    dgate = dX' . v      da = dgate gate (1 - gate) / (2 sqrt|a|)      dv = sum_s gate dX'
    dX = dX' + da (q_w k_w n(key) / sqrt(D) - a n(X)) / rms(X)         likewise dkey

Where |a| is under its floor of 1e-6 the gate does not move, and a gate inside an image is shut:
both pass nothing to a. While training, the table is the float master of all rows, read here;
the hash, an integer function of the tokens, has no gradient. Source: engram.py, differentiated.
"""

import numpy as np

from ..dispatch import op
from ..ops import linear_fp8, sigmoid
from .ops import linear_fp8_backward, sum_rows


def keys_and_value(rows, p, streams):
    """rows (T, columns) -> memory (T, columns * C), key (T, S, D), value (T, D)."""


@op
def engram_gate_backward(dnew, streams, key, value, q_weight, k_weight, is_image, eps):
    """dnew (T, S, D) by the new streams, then the inputs of `engram_gate`
    -> dstreams, dkey (T, S, D), dvalue (T, D), dq_weight, dk_weight (S, D).
    """
    scale = streams.shape[-1] ** -0.5
    r_x, r_key = (1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) for x in (streams, key))
    n_x, n_key, weights = streams * r_x, key * r_key, q_weight * k_weight
    a = np.sum(n_x * n_key * weights, axis=-1, keepdims=True) * scale  # (T, S, 1)
    gate, slope = _gate(a, is_image)
    da = np.sum(dnew * value[:, None], axis=-1, keepdims=True) * slope
    dstreams = dnew + da * r_x * (weights * n_key * scale - a * n_x * scale**2)
    return dstreams
