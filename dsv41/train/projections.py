"""How do the gradients of queries and outputs squeeze through the same narrow waist?

    q = c_q Wqb,  c_q = RMSNorm(x Wqa)       dc_q = dq Wqb         dx = RMSNorm'(dc_q) Wqa
    y = z Wb,     z_g = o_g Wa_g             dz   = dy Wb^T        do_g = dz_g Wa_g^T

Each group of heads meets only its own block of Wa, so the gradient of Wa is made block by block and
laid side by side as the weight is. c_q is also what the indexer reads, but the indexer's loss does
not reach it (losses.py), so attention alone moves these weights. FP8 rounding of x, c_q and z is
passed straight through, while the weights' gradients are made with the rounded values.
Source: projections.py.
"""

from ..ops import dense, linear_fp8, rmsnorm
from .ops import linear_fp8_backward, rmsnorm_backward


def low_rank_queries_backward(dq, x, p, config, numerics):
    """dq (T, H, C), x (T, D) -> dx (T, D), gradients of wq_a, q_norm, wq_b."""
    norm, eps = p["q_norm"]["weight"], config.rms_norm_eps
    low = linear_fp8(x, p["wq_a"]["weight"], numerics)
    c_q = rmsnorm(low, norm, eps, numerics)
    dq = dq.reshape(len(x), config.num_attention_heads * config.head_dim)
    dc_q, dwq_b = linear_fp8_backward(dq, c_q, p["wq_b"]["weight"], numerics)
    dlow, dnorm = rmsnorm_backward(dc_q, low, norm, eps)
    dx, dwq_a = linear_fp8_backward(dlow, x, p["wq_a"]["weight"], numerics)
    grads = {"wq_a": {"weight": dwq_a}, "q_norm": {"weight": dnorm}, "wq_b": {"weight": dwq_b}}
    return dx, grads


def grouped_output_backward(dy, o, p, config, numerics):
    """dy (T, D), o (T, H, C) -> do (T, H, C), gradients of wo_a, wo_b."""
    tokens, groups, rank = len(o), config.o_groups, config.o_lora_rank
    wo_a = dense(p["wo_a"]["weight"])
    blocks = wo_a.reshape(groups, rank, -1)  # (G, O, H/G * C)
    o_of = o.reshape(tokens, groups, blocks.shape[2]).transpose(1, 0, 2)  # (G, T, H/G * C)
    z = numerics.store(o_of @ blocks.transpose(0, 2, 1))  # (G, T, O)
    z = z.transpose(1, 0, 2).reshape(tokens, groups * rank)
    dz, dwo_b = linear_fp8_backward(dy, z, p["wo_b"]["weight"], numerics)
    dz = dz.reshape(tokens, groups, rank).transpose(1, 0, 2)  # (G, T, O)
    do = (dz @ blocks).transpose(1, 0, 2).reshape(o.shape)
    dwo_a = (dz.transpose(0, 2, 1) @ o_of).reshape(wo_a.shape)
    return do, {"wo_a": {"weight": dwo_a}, "wo_b": {"weight": dwo_b}}
