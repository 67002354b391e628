"""How does an entry of the global KV pass its gradient to the m tokens it was pooled from?

    a_t[c] = softmax_t(g[t, c])      pooled[c] = sum_t a_t[c] u[t, c]       latent = RMSNorm(pooled)

    du[t, c] = a_t[c] dpooled[c]     dg[t, c] = a_t[c] (u[t, c] - pooled[c]) dpooled[c]

channel by channel, as in any softmax average. From there on two linear maps, without activation
rounding. The tokens behind the last whole group were never pooled and get nothing, which is also
why a group never joins two documents: it counts from the beginning of its own. For m = 1 there is
no gate: a is 1 and dg is 0. The entry's gradient is the sum over every layer that read it
(block.py). Rounding of the main KV is passed straight through where the format reaches.
Source: compress.py, differentiated.
"""

import numpy as np

from ..compress import line_up, pool_groups
from ..dispatch import beside, op
from ..ops import matmul_rows
from ..rope import rotate
from .ops import linear_backward, rmsnorm_backward, straight_through
from .rope import rotate_backward


@op
def pool_groups_backward(dpooled, u, g):
    """dpooled (N, C), u, g (N, m, C) -> du, dg (N, m, C)."""
    weights = np.exp(g - np.max(g, axis=1, keepdims=True))
    weights = weights / np.sum(weights, axis=1, keepdims=True)
    du = weights * dpooled[:, None]
    pooled = np.sum(weights * u, axis=1, keepdims=True)
    return du, du * (u - pooled)


def compress_backward(dlatent, x, p, ratio, batch, config, numerics):
    """dlatent (N, C) of a call's entries, x (T, D), p the "compressor" parameters; every request
    begins in the call -> dx (T, D), gradients of wkv, norm and, for m > 1, wgate.
    """
    members = beside(line_up(batch, ratio).members, x)
    x_of = x[members.ravel()]  # (N * m, D), the rows that were pooled
    shape = (*members.shape, dlatent.shape[1])  # (N, m, C)
    u = matmul_rows(x_of, p["wkv"]["weight"], numerics)
    g = matmul_rows(x_of, p["wgate"]["weight"], numerics) if ratio > 1 else np.zeros_like(u)
    u, g = u.reshape(shape), g.reshape(shape)
    pooled = numerics.store(pool_groups(u, g))
    dpooled, dnorm = rmsnorm_backward(dlatent, pooled, p["norm"]["weight"], config.rms_norm_eps)
    du, dg = pool_groups_backward(dpooled, u, g)
    dx, grads = np.zeros_like(x), {"norm": {"weight": dnorm}}
    for name, d in (("wkv", du), ("wgate", dg))[:ratio]:
        part, dw = linear_backward(d.reshape(len(x_of), shape[2]), x_of, p[name]["weight"])
        dx[members.ravel()] += part  # a token is in one group only
        grads[name] = {"weight": dw}
    return dx, grads


def main_kv_backward(dkv, latent, positions, freqs, numerics):
    """dkv (N, C) by the decoded records, latent (N, C) -> dlatent (N, C)."""
    rotated = numerics.store(rotate(latent, positions, freqs))
    dkv = straight_through(dkv, rotated, numerics.main_kv)
    return rotate_backward(dkv, positions, freqs)
