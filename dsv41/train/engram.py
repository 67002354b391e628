"""How do the rows of a table of hundreds of millions of n-grams learn?

Only rows that were looked up get a gradient, so it is kept as (rows, values), each row named once,
its values added up over all places that read it. In front of that lies the gate; with n(x) =
x / rms(x), for every stream

    a = sum( q_w n(X) k_w n(key) ) / sqrt(D)    gate = sigmoid( sign(a) sqrt|a| )    X' = X + gate v

    da = (dX' . v) gate (1 - gate) / (2 sqrt|a|)        dv = sum over streams of gate dX'
    dX = dX' + da (q_w k_w n(key) / sqrt(D) - a n(X) / D) / rms(X)       dkey alike, without dX'

Where |a| is below its floor of 1e-6 the gate does not move, and inside an image it is shut: neither
passes anything to a. A table that is trained is a float master, `embed.weight` (rows, C) without
scales; one of codes and scales is read as well, for a model that is frozen.
Source: engram.py, differentiated.
"""

import numpy as np

from ..dispatch import beside, op
from ..engram import engram_gate, read_rows
from ..ops import linear_fp8, sigmoid
from .ops import linear_fp8_backward, sum_rows

FLOOR = 1e-6  # of |a| under the root, as in engram_gate


def engram_forward(streams, rows, p, is_image, config, numerics):
    """`engram` on a float table: streams (T, S, D), rows (T, columns) -> new streams (T, S, D)."""
    _, key, value = _recall(rows, p, streams.shape, numerics)
    weights = p["q_weight"], p["k_weight"]
    return engram_gate(streams, key, value, *weights, is_image, config.rms_norm_eps, numerics)[0]


def _recall(rows, p, shape, numerics):
    """-> memory (T, columns * C), key (T, S, D), value (T, D)."""
    table, weight = p["embed"], p["wkv"]["weight"]
    if "scale" in table:
        memory = read_rows(table, rows)
    else:
        memory = table["weight"][beside(rows, table["weight"])].reshape(len(rows), weight.shape[1])
    memory = beside(memory, weight)  # the table may stay in host memory
    kv = linear_fp8(memory, weight, numerics)
    split = shape[1] * shape[2]
    return memory, kv[:, :split].reshape(shape), kv[:, split:]


@op
def engram_gate_backward(dnew, streams, key, value, q_weight, k_weight, is_image, eps):
    """dnew (T, S, D) by the new streams, then the inputs of `engram_gate`
    -> dstreams, dkey (T, S, D), dvalue (T, D), dq_weight, dk_weight (S, D).
    """
    scale = streams.shape[-1] ** -0.5
    r_x, r_key = (1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) for x in (streams, key))
    n_x, n_key, both = streams * r_x, key * r_key, q_weight * k_weight
    a = np.sum(n_x * n_key * both, axis=-1, keepdims=True) * scale  # (T, S, 1)
    gate, slope = _gate(a, is_image[:, None, None])
    da = np.sum(dnew * value[:, None], axis=-1, keepdims=True) * slope
    dstreams = dnew + da * r_x * (both * n_key * scale - a * n_x * scale**2)
    dkey = da * r_key * (both * n_x * scale - a * n_key * scale**2)
    dboth = np.sum(da * scale * n_x * n_key, axis=0)  # (S, D)
    return dstreams, dkey, np.sum(gate * dnew, axis=1), dboth * k_weight, dboth * q_weight


def _gate(a, is_image):
    """a, is_image (T, S, 1) -> the gate and its derivative by a."""
    root = np.sqrt(np.maximum(np.abs(a), FLOOR))
    gate = np.where(is_image, 0, sigmoid(np.sign(a) * root))
    return gate, np.where(np.abs(a) > FLOOR, gate * (1 - gate) / (2 * root), 0)


def engram_backward(dnew, streams, rows, p, is_image, config, numerics):
    """dnew, streams (T, S, D), rows (T, columns) -> dstreams (T, S, D), gradients; that of
    embed.weight is (rows (u,) ascending, values (u, C)).
    """
    memory, key, value = _recall(rows, p, streams.shape, numerics)
    dstreams, dkey, dvalue, dq, dk = engram_gate_backward(
        dnew, streams, key, value, p["q_weight"], p["k_weight"], is_image, config.rms_norm_eps
    )
    dkv = np.concatenate([dkey.reshape(len(rows), -1), dvalue], axis=1)
    dmemory, dwkv = linear_fp8_backward(dkv, memory, p["wkv"]["weight"], numerics)
    dtable = sum_rows(
        dmemory.reshape(rows.size, dmemory.shape[1] // rows.shape[1]), beside(rows.ravel(), dmemory)
    )
    grads = {"q_weight": dq, "k_weight": dk, "wkv": {"weight": dwkv}, "embed": {"weight": dtable}}
    return dstreams, grads
