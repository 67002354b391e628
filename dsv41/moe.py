"""Which experts see a token, and what do they add? (DeepSeekMoE)

    s = sqrt(softplus(x Wg))                       one score per expert
    chosen = top-k of s + bias                     the bias only chooses
    w = s[chosen] / sum(s[chosen]) * 1.5           the weights ignore it
    y = sum_e w_e * down( swiglu(gate x, up x) ) + shared expert

The bias balances the load without a loss term that fights the model. Images have a bias of their
own, because their tokens load other experts than text does. The router weight is applied to the
hidden vector of an expert, before its down projection is quantised; experts are summed in
ascending order, the shared one last. Source: report, section 2.1.1; Gate, Expert and MoE in the
released inference/model.py.
"""

import numpy as np

from .dispatch import on_host, op
from .indexer import index_topk
from .ops import linear_fp8, matmul_rows, sqrt_softplus, swiglu


@op
def route(x, p, is_image, experts, factor, normalize, numerics):
    """x (T, D) f32, p the "gate" parameters, is_image (T,) bool, experts: how many to choose
    -> expert (T, k) int64, best biased score first; weight (T, k) f32; biased scores (T, E) f32.

    Equal biased scores: the lower expert wins.
    """
    scores = sqrt_softplus(matmul_rows(x, p["weight"], numerics))
    bias = p["bias"]
    if "bias_vl" in p:
        bias = np.where(is_image[:, None], p["bias_vl"], bias)
    biased = scores + bias
    count = np.zeros(len(x), np.int64, like=x) + biased.shape[1]
    chosen = index_topk(biased, count, experts)  # ascending expert number
    if on_host(chosen) and (chosen < 0).any():
        raise ValueError(
            f"x: the router's scores of token {int(np.argmin(chosen) // experts)} are NaN"
        )
    best_first = np.argsort(-np.take_along_axis(biased, chosen, axis=1), axis=1, kind="stable")
    chosen = np.take_along_axis(chosen, best_first, axis=1)
    weight = np.take_along_axis(scores, chosen, axis=1)
    if normalize and experts > 1:
        weight = weight / (np.sum(weight, axis=1, keepdims=True) + np.float32(1e-20))
    return chosen, weight * np.float32(factor), biased


def expert(x, p, limit, numerics, weight=None):
    """One expert: x (t, D) f32, router weight (t,) f32 or None -> (t, D) f32.

    p holds w1 (gate), w3 (up) and w2 (down).
    """
    hidden = swiglu(
        linear_fp8(x, p["w1"]["weight"], numerics),
        linear_fp8(x, p["w3"]["weight"], numerics),
        limit,
    )
    if weight is not None:
        hidden = hidden * weight[:, None]
    return linear_fp8(numerics.store(hidden), p["w2"]["weight"], numerics)


@op
def moe_experts(x, p, chosen, weight, limit, numerics):
    """x (T, D) f32, chosen (T, k) int, weight (T, k) f32 -> (T, D) f32; p the "ffn" parameters."""
    y = np.zeros_like(x)
    flat, weights = chosen.ravel(), weight.ravel()
    by_expert = np.argsort(flat, kind="stable")  # tokens of one expert side by side, in order
    loads = np.bincount(flat, minlength=len(p["experts"])).tolist()
    end = 0
    for e, load in enumerate(loads):
        begin, end = end, end + load
        if load:
            at = by_expert[begin:end]
            row = at // chosen.shape[1]
            y[row] += expert(x[row], p["experts"][e], limit, numerics, weights[at])
    if "shared_experts" in p:
        y += expert(x, p["shared_experts"], limit, numerics)
    return numerics.store(y)
