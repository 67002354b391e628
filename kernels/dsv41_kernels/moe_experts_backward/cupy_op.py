"""Gradients of all experts as batched products on a GPU; the contract is the docstring of
dsv41.train.moe.moe_experts_backward. Padding rows have weight 0 and so no part in any gradient.
"""

from dsv41.ops import swiglu
from dsv41.train.moe import expert_backward
from dsv41.train.moe import moe_experts_backward as definition
from dsv41.train.ops import swiglu_backward

from ..moe_experts.grouped import Groups, stacked


def moe_experts_backward(dy, x, p, chosen, weight, limit, numerics):
    if not len(x) or numerics.batch_invariant:
        return definition.definition(dy, x, p, chosen, weight, limit, numerics)
    groups = Groups(chosen, len(p["experts"]), x.shape[1])
    dx, dweight, grads = experts_backward(dy, x, p["experts"], groups, weight, limit, numerics)
    grads = {"experts": {e: {k: {"weight": d[e]} for k, d in grads.items()} for e in p["experts"]}}
    if "shared_experts" in p:
        part, _, shared = expert_backward(dy, x, p["shared_experts"], limit, numerics)
        dx, grads["shared_experts"] = dx + part, shared
    return dx, dweight, grads


def experts_backward(dy, x, experts, groups, weight, limit, numerics):
    """`expert_backward` for all experts at once -> dx, dweight, {"w1": (E, F, D), ...}."""
    fake, store = numerics.activation.fake, numerics.store
    w1, w3, w2 = (stacked(experts, name) for name in ("w1", "w3", "w2"))  # (E, N, K)
    weights = groups.spread(weight)[:, :, None]  # (E, room, 1)
    rows, dout = fake(groups.gather(x)), groups.gather(dy)
    gate, up = store(rows @ w1.transpose(0, 2, 1)), store(rows @ w3.transpose(0, 2, 1))
    plain = swiglu(gate, up, limit)
    hidden = fake(store(plain * weights))
    dplain = dout @ w2
    dweight = groups.collect((dplain * plain).sum(axis=2))
    dgate, dup = swiglu_backward(dplain * weights, gate, up, limit)
    dx = groups.combine(dgate @ w1 + dup @ w3)
    names = {"w1": (dgate, rows), "w3": (dup, rows), "w2": (dout, hidden)}
    return dx, dweight, {k: d.transpose(0, 2, 1) @ inputs for k, (d, inputs) in names.items()}
