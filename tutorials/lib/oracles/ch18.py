"""Chapter 18: answers come from dsv41.train, not from the chapter's own code."""

import numpy as np

from dsv41.train.muon import muon_step, nesterov
from dsv41.train.sinkhorn_update import balance, sinkhorn_step

from ..page import Exercise


def _muon_weight(weight, momentum, g, lr):
    weight, momentum = weight.copy(), momentum.copy()
    muon_step([(weight, nesterov(momentum, g), lr)], decay=0.1)
    return weight


def _matrices(rng):
    for n, m in ((2, 3), (5, 2), (4, 4), (1, 6), (12, 7)):
        weight, momentum, g = rng.standard_normal((3, n, m))
        yield weight, momentum, g, rng.uniform(0.1, 1)
    weight, momentum, zero = rng.standard_normal((4, 6)), rng.standard_normal((4, 6)), np.zeros(())
    yield weight, momentum, zero + np.zeros((4, 6)), 0.5  # no gradient: along the momentum
    yield weight, np.zeros((4, 6)), np.zeros((4, 6)), 0.5  # nothing at all: decay only


def _idle_steps(ratio, beta, tau):
    steps = 0
    # two rows of one number, with mean norm 1
    while balance(np.array([[ratio], [2 - ratio]]), tau=tau)[0, 0] != 0:
        ratio, steps = ratio * beta, steps + 1
    return steps


def _ratios(rng):
    yield 1.0, 0.5, 0.25  # reaches tau exactly
    yield 0.125, 0.5, 0.25  # below from the start
    yield 0.25, 0.5, 0.25
    for _ in range(4):
        yield float(rng.uniform(0.05, 1)), float(rng.uniform(0.8, 0.97)), 1e-3


def _table_step(weight, momentum, rows, values, lr):
    weight, momentum, grad = weight.copy(), momentum.copy(), np.zeros_like(weight)
    np.add.at(grad, rows, values)
    sinkhorn_step(weight, momentum, grad, lr)
    return weight


def _tables(rng):
    for m, n, t in ((6, 3, 4), (10, 4, 12), (40, 8, 9), (5, 2, 5)):
        weight, momentum = rng.standard_normal((2, m, n))
        momentum[0] *= 1e-6  # below the threshold, unless it is hit
        rows = rng.integers(0, m, t)
        rows[-1] = rows[0]  # one row twice
        yield weight, momentum, rows, rng.standard_normal((t, n)), rng.uniform(0.1, 1)


EXERCISES = {
    "muon_weight": Exercise(
        _muon_weight,
        blank="return the decayed weight minus lr times the scaled, orthogonalised direction",
        hint="decay is 1 - 0.1 lr on the old weight; the direction is mu M + G with the new M; the "
        "scale takes the longer side",
        inputs=_matrices,
        within=1e-6,
    ),
    "idle_steps": Exercise(
        _idle_steps,
        blank="return how many steps pass before the row is masked",
        hint="a row that is equal to the threshold is masked already; count from t = 0",
        inputs=_ratios,
    ),
    "table_step": Exercise(
        _table_step,
        blank="return the new weight",
        hint="does grad[rows] += values count a row that is named twice? The mask looks at the "
        "Nesterov sum, not at the gradient",
        inputs=_tables,
        within=1e-9,
    ),
}
