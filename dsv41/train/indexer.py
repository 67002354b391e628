"""How does the indexer learn, when choosing the best k has no gradient?

Its scores do, through a loss of their own (`index_loss` in losses.py), which compares them with
the attention that the chosen entries got. From a score's gradient G = dI[t, j] on

    I[t, j] = sum_a w[t, a] relu( q[t, a] . k_j )

    dw[t, a] = sum_j G relu(q . k_j)     dq[t, a] = sum_j G w [q . k_j > 0] k_j
    dk_j     = sum_t sum_a G w [q . k_j > 0] q[t, a]

over the selected entries only. All of this ends inside the indexer: what it read, the layer input
x, the query latent c_q and the compressed latent, counts as a constant, as in V3.2's sparse stage.
The functions return those gradients all the same, for whoever decides otherwise, and block.py
drops them. A source's keys serve every index source behind it, so their gradients are summed before
they move wk. MXFP4 rounding is passed straight through. Source: indexer.py, differentiated.
"""

import numpy as np

from ..dispatch import block_elements, op
from ..indexer import index_scores
from ..ops import linear
from .losses import index_loss
from .ops import add_rows, linear_backward, linear_fp8_backward, rmsnorm_backward
from .rope import rotate_backward


@op
def index_scores_backward(dscores, q, w, keys, numerics):
    """dscores (T, P), q (T, I, J), w (T, I), keys (T, P, Z) records, a list per query
    -> dq (T, I, J), dw (T, I), dkeys (T, P, J) by the decoded keys.
    """
    k = numerics.index.decode(keys, q.shape[-1])
    dots = q @ k.transpose(0, 2, 1)  # (T, I, P)
    dw = np.sum(np.maximum(dots, 0) * dscores[:, None], axis=-1)
    ddots = np.where(dots > 0, dscores[:, None] * w[:, :, None], 0)
    return ddots @ k, dw, ddots.transpose(0, 2, 1) @ q


@op
def selection_backward(q, w, keys, rows, attention, weight, numerics):
    """The index loss of all queries, in blocks, so that no (T, K, J) exists.

    q (T, I, J), w (T, I), keys (N, Z) records, rows (T, K) those each query selected, -1 padded,
    attention (T, K) what they got -> sum of the losses, and with `weight` on each query's loss
    dq (T, I, J), dw (T, I), dkeys (N, J) by the decoded keys.
    """
    loss, dq, dw = 0.0, np.zeros_like(q), np.zeros_like(w)
    dkeys = np.zeros((len(keys), q.shape[2]), q.dtype, like=q)
    step = max(1, block_elements(q) // (rows.shape[1] * max(q.shape[1:])))
    for begin in range(0, len(q), step):
        at = slice(begin, begin + step)
        near = keys[np.maximum(rows[at], 0)]
        scores = index_scores(q[at], w[at], near, numerics)
        losses, dscores = index_loss(scores, rows[at] >= 0, attention[at])
        loss = loss + np.sum(losses)
        grads = index_scores_backward(weight * dscores, q[at], w[at], near, numerics)
        dq[at], dw[at], dnear = grads
        add_rows(dkeys, dnear, rows[at])
    return loss, dq, dw, dkeys


def index_keys_backward(dkeys, latent, p, positions, freqs, config, numerics):
    """dkeys (N, J) by decoded keys, latent (N, C) -> dlatent (N, C), gradients of wk, k_norm."""
    k = linear(latent, p["wk"]["weight"], numerics)
    norm = p["k_norm"]["weight"]
    dkeys = rotate_backward(dkeys, positions, freqs)
    dk, dnorm = rmsnorm_backward(dkeys, k, norm, config.rms_norm_eps)
    dlatent, dwk = linear_backward(dk, latent, p["wk"]["weight"])
    return dlatent, {"wk": {"weight": dwk}, "k_norm": {"weight": dnorm}}


def index_queries_backward(dq, dw, x, c_q, p, positions, freqs, config, numerics):
    """dq (T, I, J), dw (T, I), x (T, D), c_q (T, Q)
    -> dx (T, D), dc_q (T, Q), gradients of wq_b, weights_proj.
    """
    heads, channels = config.index_n_heads, config.index_head_dim
    dq = rotate_backward(dq, positions, freqs).reshape(len(x), heads * channels)
    dc_q, dwq_b = linear_fp8_backward(dq, c_q, p["wq_b"]["weight"], numerics)
    dw = dw * (channels**-0.5 * heads**-0.5)
    dx, dproj = linear_backward(dw, x, p["weights_proj"]["weight"])
    return dx, dc_q, {"wq_b": {"weight": dwq_b}, "weights_proj": {"weight": dproj}}
