"""How does a table move whose rows are tokens and whose columns are features?

Where Adam keeps two numbers per entry, one momentum suffices if rows and columns of the update are
normalised in turn until all of them have about the same size:

    M <- beta M + (1 - beta) G           U = beta M + (1 - beta) G              Nesterov
    U_i <- 0                             where |U_i| <= tau * mean_i |U_i|      rows without news
    U <- U / (row norms + eps), U / (column norms + eps), ..., K times          rows first and last
    W <- W - gamma * lr * sqrt(n) U                                             no weight decay

`balance` does that literally. U stays diag(r) G diag(c), so `scaling_vectors` keeps r and c only,
and G may lie in shards of rows. K is odd, so a row ends with RMS exactly 1, however small its
gradient; a row that is no longer hit goes on at full size until its momentum falls below tau, about
135 steps later. Source: report, section 2.5, Algorithm 1; section 3.1.3 for the vectors.
"""

import math

import numpy as np

from .muon import GAMMA, MOMENTUM

STEPS, TAU, EPS = 11, 1e-3, 1e-20


def balance(g, steps=STEPS, tau=TAU, eps=EPS):
    """g (m, n) -> the update (m, n) of its dtype: rows of RMS 1, or 0 where masked."""
    _check_odd(steps)
    norms = _norms(g, axis=1)  # (m, 1)
    u = g * (norms > tau * np.mean(norms))
    for k in range(steps):
        u = u / (_norms(u, axis=1 - k % 2) + eps)
    return math.sqrt(g.shape[1]) * u


def scaling_vectors(shards, steps=STEPS, tau=TAU, eps=EPS):
    """The r and c of balance(g) = sqrt(n) * r[:, None] * g * c, for a g cut into blocks of rows.

    shards: list of (m_i, n) -> list of r (m_i,), and c (n,). What shards would exchange: one sum
    of norms, then n column sums in each of the K // 2 column passes.
    """
    _check_odd(steps)
    squares = [g * g for g in shards]
    norms = [np.sqrt(np.sum(s, axis=1)) for s in squares]
    mean = sum(np.sum(n) for n in norms) / sum(len(n) for n in norms)
    r = [(n > tau * mean).astype(n.dtype) for n in norms]
    c = np.zeros_like(squares[0], shape=shards[0].shape[1:]) + 1
    for _ in range(steps // 2):
        r = _row_pass(r, squares, c, eps)
        column = np.sqrt(sum((x * x) @ s for x, s in zip(r, squares, strict=True)))
        # trap: dividing by 0 + eps again and again would take c to infinity, and 0 * inf to NaN
        c = np.where(column > 0, c / (c * column + eps), c)
    return _row_pass(r, squares, c, eps), c


def _row_pass(r, squares, c, eps):
    return [x / (x * np.sqrt(s @ (c * c)) + eps) for x, s in zip(r, squares, strict=True)]


def sinkhorn_step(weight, momentum, grad, lr, beta=MOMENTUM, gamma=GAMMA, **constants):
    """One step of a table, in place: weight and momentum (m, n).

    grad (m, n), or (rows (t,) int, values (t, n)) with every row named once: the rows hit.
    constants: steps, tau and eps of scaling_vectors.
    """
    g = damped_nesterov(momentum, grad, beta)
    (r,), c = scaling_vectors([g], **constants)
    weight -= (gamma * lr * math.sqrt(weight.shape[1])) * (r[:, None] * g * c)


def damped_nesterov(momentum, grad, beta=MOMENTUM):
    """Move `momentum` on by one gradient, dense or (rows, values), in place -> U, unbalanced."""
    momentum *= beta
    _add(momentum, grad, 1 - beta)
    g = beta * momentum
    _add(g, grad, 1 - beta)
    return g


def _add(total, grad, factor):
    if isinstance(grad, tuple):
        rows, values = grad
        total[rows] += factor * values  # trap: a row named twice would count once
    else:
        total += factor * grad


def _norms(x, axis):
    return np.sqrt(np.sum(x * x, axis=axis, keepdims=True))


def _check_odd(steps):
    if steps % 2 == 0:
        raise ValueError(f"steps: expected an odd number, so that rows come last, got {steps}")
