"""In which direction does a weight matrix move? (Muon)

A gradient matrix has a few large singular values and many small ones. Muon keeps its singular
vectors and makes every singular value 1, so that rare directions learn as fast as common ones:

    M <- mu M + G            Y = (mu M + G) / |mu M + G|_F              momentum, Nesterov
    Y <- a Y + (b A + c A^2) Y,   A = Y Y^T                             ten times: Newton-Schulz
    W <- (1 - lr wd) W - lr * gamma * sqrt(max(n, m)) * Y

A step maps a singular value s to p(s) = a s + b s^3 + c s^5. Eight steep steps lift even s = 1e-4
to 0.7 .. 1.2 but keep it moving in there; two flat ones, with p(1) = 1 and p'(1) = 0, settle it. An
orthogonal (n, m) matrix has RMS 1 / sqrt(max(n, m)), so the update has RMS gamma, near Adam's.
Source: report, section 2.5; DeepSeek-V4's report for the coefficients; Jordan et al. 2024.
"""

import math

import numpy as np

from .many import many, scale_add

STEEP, FLAT = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)
HYBRID = (STEEP,) * 8 + (FLAT,) * 2
MOMENTUM, GAMMA = 0.95, 0.18
BATCH_ELEMENTS = 1 << 24  # bound on the matrices that go through Newton-Schulz together


def newton_schulz(g, steps=HYBRID):
    """g (..., n, m) -> (..., n, m) of its dtype: the same singular vectors, singular values near 1.

    Leading axes are independent matrices; a zero matrix stays zero. The result does not depend on
    the size of g as long as |g|_F is far above 1e-7.
    """
    is_tall = g.shape[-2] > g.shape[-1]
    # A = Y Y^T has the side of Y's rows: take the shorter one
    y = np.ascontiguousarray(g.swapaxes(-1, -2) if is_tall else g, like=g)
    y = y / (np.sqrt(np.sum(y * y, axis=(-2, -1), keepdims=True)) + 1e-7)
    for a, b, c in steps:
        gram = y @ y.swapaxes(-1, -2)
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.swapaxes(-1, -2) if is_tall else y


def nesterov(momentum, g, mu=MOMENTUM):
    """Move `momentum` on by one gradient, in place -> the direction mu M + G, a new array."""
    momentum *= mu
    momentum += g
    return mu * momentum + g


@many
def nesterov_all(momenta, grads, mu=MOMENTUM):
    """`nesterov` for lists of arrays -> list of directions."""
    return [nesterov(m, g, mu) for m, g in zip(momenta, grads, strict=True)]


def muon_update(direction, gamma=GAMMA):
    """direction (..., n, m) -> what a step with learning rate 1 subtracts from the weight."""
    return newton_schulz(direction) * (gamma * math.sqrt(max(direction.shape[-2:])))


def muon_step(jobs, decay, gamma=GAMMA):
    """Update matrices in place. jobs: list of (weight (n, m), direction (n, m), learning rate).

    Matrices of one shape, such as the heads or experts of all layers, share batched products. An
    expert that no token chose still moves at full size, along its momentum; give no job to stop it.
    """
    groups = {}
    for job in jobs:
        groups.setdefault(job[0].shape, []).append(job)
    for (n, m), group in groups.items():
        size = max(1, BATCH_ELEMENTS // (n * m))
        for start in range(0, len(group), size):
            batch = group[start : start + size]
            updates = muon_update(np.stack([direction for _, direction, _ in batch]), gamma)
            weights, _, rates = zip(*batch, strict=True)
            keep, step = [1 - lr * decay for lr in rates], [-lr for lr in rates]
            scale_add(list(weights), keep, list(updates), step)


def matrix_rows(name, shape, config):
    """tensor name, its shape (n, m) -> row counts of the matrices that are stacked in it, sum n.

    Head-wise Muon: queries are orthogonalised head by head, so that a head with a large gradient
    does not set the pace of the others. The key side has one shared head, so wkv and wk are whole,
    as is wq_a, which has no head axis. Tensors that merely store several maps on top of each other
    are taken apart too: the groups of wo_a, Engram's key per stream and value, and mHC's pre, post
    and comb. The report names queries and keys only; for these others it is the same argument.
    """
    s, leaf = config.hc_mult, name.removesuffix(".weight").split(".", 2)[-1]
    if leaf in ("hc_attn_fn", "hc_ffn_fn"):
        return s, s, s * s
    if name.startswith("vision."):
        return _tower_rows(leaf, shape[0], config.vision_config.num_attention_heads)
    count = {
        "attn.wq_b": config.num_attention_heads,
        "attn.indexer.wq_b": config.index_n_heads,
        "attn.wo_a": config.o_groups,
        "engram.wkv": s + 1,
    }.get(leaf, 1)
    return (shape[0] // count,) * count


def _tower_rows(leaf, rows, heads):
    """The vision tower stacks queries, keys and values, and the gate and up maps of its MLP."""
    if leaf.endswith("attn.wqkv"):
        return (*(rows // 3 // heads,) * (2 * heads), rows // 3)
    return (rows // 2,) * 2 if leaf.endswith("mlp.w1") else (rows,)
