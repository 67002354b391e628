"""Experts as batched products on a GPU; the contract is dsv41.moe.moe_experts' docstring."""

from dsv41.moe import expert
from dsv41.moe import moe_experts as definition
from dsv41.ops import swiglu

from .grouped import Groups, stacked


def moe_experts(x, p, chosen, weight, limit, numerics):
    if not len(x) or numerics.batch_invariant:  # which asks for products of one fixed size
        return definition.definition(x, p, chosen, weight, limit, numerics)
    groups = Groups(chosen, len(p["experts"]), x.shape[1])
    rows = numerics.activation.fake(groups.gather(x))  # (E, room, D)
    w1, w3, w2 = (stacked(p["experts"], name).transpose(0, 2, 1) for name in ("w1", "w3", "w2"))
    hidden = swiglu(numerics.store(rows @ w1), numerics.store(rows @ w3), limit)
    hidden = numerics.store(hidden * groups.spread(weight)[:, :, None])
    y = groups.combine(numerics.store(numerics.activation.fake(hidden) @ w2))
    if "shared_experts" in p:
        y += expert(x, p["shared_experts"], limit, numerics)
    return numerics.store(y)
