"""How does a parameter move that is no matrix? (AdamW)

Norm weights, biases, scaling factors and attention sinks have no singular values to equalise. Each
entry is divided by the size its own gradient usually has:

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    w <- (1 - lr wd) w - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

The divisions by 1 - b^t undo the start at zero: the first step has size lr. Weight decay does not
go through the gradient, and so not through v ("decoupled"). Source: Loshchilov and Hutter 2019;
report, section 2.5, and its section 4.2.2 for the constants.
"""

import math

import numpy as np

from .many import many

BETAS, EPS = (0.9, 0.95), 1e-20


def adamw_step(weight, m, v, t, grad, lr, decay=0.0, betas=BETAS, eps=EPS):
    """One step, in place: weight, m, v and grad of one shape; t counts from 1, this step included.

    An entry whose gradients were all zero does not move: 0 / (0 + eps).
    """
    b1, b2 = betas
    m *= b1
    m += (1 - b1) * grad
    v *= b2
    v += (1 - b2) * grad * grad
    size = np.sqrt(v) / math.sqrt(1 - b2**t) + eps
    weight *= 1 - lr * decay
    weight -= (lr / (1 - b1**t)) * (m / size)


@many
def adamw_steps(weights, ms, vs, ts, grads, rates, decays, betas=BETAS, eps=EPS):
    """`adamw_step` for lists of arrays, of their step counts, learning rates and decays."""
    for w, m, v, t, g, lr, decay in zip(weights, ms, vs, ts, grads, rates, decays, strict=True):
        adamw_step(w, m, v, t, g, lr, decay, betas, eps)
