"""Which gradients reach the experts, and which the router?

    y = sum_e w_e E_e(x) + shared(x)          E(x) = W2 ( h(x) w ),  h = swiglu(W1 x, W3 x)

Only chosen experts see a token, so only they learn from it. The router weight stands in front of
W2, so its gradient is that of a number multiplying the hidden vector:

    d(h w) = dy W2      dh = w d(h w)      dw_e = h . d(h w)
    w_e = f s_e / S, S = sum of the chosen s      ds_e = (f / S) (dw_e - sum_e' dw_e' s_e' / S)
    s = sqrt(softplus(x Wg))

The choice itself, and the bias that takes part in it, have no gradient: a weight can change how
loudly the chosen experts speak, not who is chosen. The bias moves by a rule on the load instead,
and the balance loss adds its own gradient to the scores of all experts (losses.py), `dscores` here.
Source: moe.py, differentiated.
"""

import numpy as np

from ..dispatch import op
from ..ops import linear_fp8, matmul_rows, sqrt_softplus, swiglu
from .ops import linear_backward, linear_fp8_backward, sqrt_softplus_backward, swiglu_backward


@op
def route_backward(dweight, dscores, x, p, chosen, factor, normalize, numerics):
    """dweight (T, k) of the chosen experts, dscores (T, E) of all scores, x (T, D), p the "gate"
    parameters, chosen (T, k) -> dx (T, D), gradient of the gate's weight.
    """
    logits = matmul_rows(x, p["weight"], numerics)
    dscores, at = dscores.copy(), (np.arange(len(x), like=x)[:, None], chosen)
    dweight = dweight * factor
    if normalize and chosen.shape[1] > 1:
        own = sqrt_softplus(logits)[at]
        total = np.sum(own, axis=1, keepdims=True) + 1e-20
        dweight = (dweight - np.sum(dweight * own, axis=1, keepdims=True) / total) / total
    dscores[at] += dweight  # a token never chooses an expert twice
    dx, dgate = linear_backward(sqrt_softplus_backward(dscores, logits), x, p["weight"])
    return dx, {"weight": dgate}


def expert_backward(dy, x, p, limit, numerics, weight=None):
    """dy, x (t, D), router weight (t,) or None -> dx (t, D), dweight (t,) or None, gradients."""
    gate = linear_fp8(x, p["w1"]["weight"], numerics)
    up = linear_fp8(x, p["w3"]["weight"], numerics)
    plain = swiglu(gate, up, limit)
    hidden = plain if weight is None else plain * weight[:, None]
    hidden = numerics.store(hidden)
    dplain, dw2 = linear_fp8_backward(dy, hidden, p["w2"]["weight"], numerics)
    dweight = None
    if weight is not None:
        dweight, dplain = np.sum(dplain * plain, axis=1), dplain * weight[:, None]
    dgate, dup = swiglu_backward(dplain, gate, up, limit)
    dx, dw1 = linear_fp8_backward(dgate, x, p["w1"]["weight"], numerics)
    dx_up, dw3 = linear_fp8_backward(dup, x, p["w3"]["weight"], numerics)
    grads = {"w1": {"weight": dw1}, "w3": {"weight": dw3}, "w2": {"weight": dw2}}
    return dx + dx_up, dweight, grads


@op
def moe_experts_backward(dy, x, p, chosen, weight, limit, numerics):
    """dy, x (T, D), chosen (T, k) int, weight (T, k) -> dx (T, D), dweight (T, k), gradients.

    An expert that nobody chose gets zeros.
    """
    dx, grads = np.zeros_like(x), {"experts": {}}
    flat, weights = chosen.ravel(), weight.ravel()
    dweight = np.zeros_like(weights)
    by_expert = np.argsort(flat, kind="stable")  # tokens of one expert side by side, in order
    end = 0
    for e, load in enumerate(np.bincount(flat, minlength=len(p["experts"])).tolist()):
        begin, end = end, end + load
        at = by_expert[begin:end]
        row = at // chosen.shape[1]
        part, dweight[at], grads["experts"][e] = expert_backward(
            dy[row], x[row], p["experts"][e], limit, numerics, weights[at]
        )
        dx[row] += part
    if "shared_experts" in p:
        part, _, shared = expert_backward(dy, x, p["shared_experts"], limit, numerics)
        dx, grads["shared_experts"] = dx + part, shared
    return dx, dweight.reshape(weight.shape), grads
