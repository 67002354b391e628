"""The balanced update: worked numbers, both forms, shards, idle rows, wrong variants."""

import math

import numpy as np
import pytest
from compare import assert_close, assert_same
from test_muon import mutated, random

from dsv41.train import sinkhorn_update
from dsv41.train.sinkhorn_update import (
    balance,
    damped_nesterov,
    scaling_vectors,
    sinkhorn_step,
)

MASKED = [
    [0.73116656, 1.57015778, 0],
    [0, 0, 0],
    [1.520066, -0.54404919, 0.6272239],
    [0.33538433, 0.36011379, 1.66067318],
    [0, 0, 0],
]
ACTIVE = [
    [0.33303697, 1.69973127, 0],
    [0, 0, 0],
    [1.03266093, -0.87840401, 1.0779693],
    [0.1350754, 0.34469429, 1.6920226],
    [1.73205081, 0, 0],
]


def example(fifth):
    return np.array([[1, 2, 0], [0, 0, 0], [3, -1, 2], [0.5, 0.5, 4], [fifth, 0, 0]])


def by_vectors(g, module=sinkhorn_update, shards=1, **constants):
    """The update out of r and c."""
    r, c = module.scaling_vectors(np.array_split(g, shards), **constants)
    return math.sqrt(g.shape[1]) * np.concatenate(r)[:, None] * g * c


def slow_balance(g, steps=11, tau=1e-3, eps=1e-20):
    """Float64, one entry at a time."""
    u = [[float(x) for x in row] for row in g]
    m, n = g.shape
    norms = [math.sqrt(sum(x * x for x in row)) for row in u]
    u = [row if a > tau * sum(norms) / m else [0.0] * n for row, a in zip(u, norms, strict=True)]
    for k in range(1, steps + 1):
        if k % 2:
            sizes = [math.sqrt(sum(x * x for x in row)) + eps for row in u]
            u = [[x / size for x in row] for row, size in zip(u, sizes, strict=True)]
        else:
            sizes = [math.sqrt(sum(u[i][j] ** 2 for i in range(m))) + eps for j in range(n)]
            u = [[x / size for x, size in zip(row, sizes, strict=True)] for row in u]
    return [[math.sqrt(n) * x for x in row] for row in u]


def uneven(m, n, seed=0, dtype=np.float64):
    """Rows and columns of very different size, every third row and one column without gradient."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((m, n)) * np.exp(2 * rng.standard_normal((m, 1)))
    g *= np.exp(2 * rng.standard_normal(n))
    g[::3] = 0
    if n > 2:
        g[:, 1] = 0
    return g.astype(dtype)


# ---- worked numbers -------------------------------------------------------------------------


@pytest.mark.parametrize(("fifth", "want"), [(0.002, MASKED), (0.004, ACTIVE)])
@pytest.mark.parametrize("form", [balance, by_vectors])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_row_is_masked_or_moves_at_full_size(fifth, want, form, dtype):
    update = form(example(fifth).astype(dtype))
    assert update.dtype == dtype
    assert_close("update", update, want, rel=1e-8 if dtype == np.float64 else 1e-6, floor=1e-8)
    used = np.any(np.array(want) != 0, axis=1)
    assert_close("rms", np.sqrt(np.mean(update[used] ** 2, axis=1)), np.ones(used.sum()), rel=1e-6)


def test_the_mean_norm_counts_all_rows():
    norms = np.linalg.norm(example(0.0022), axis=1)
    assert norms[4] > 1e-3 * norms.mean() and norms[4] < 1e-3 * norms[norms > 0].mean()
    for form in (balance, by_vectors):
        assert_close("the row is active", form(example(0.0022))[4], [math.sqrt(3), 0, 0])


@pytest.mark.parametrize("form", [balance, by_vectors])
def test_values_straight_into_the_balancing(form):
    g = np.array([[1.0, 0, 2], [3, 0, 4]])
    want = [[1.09544508, 0, 1.34164081], [1.34164076, 0, 1.09544515]]
    assert_close("update", form(g), want, rel=1e-8)


def test_the_first_step_by_hand():
    weight, momentum = np.full((5, 3), 7.0), np.zeros((5, 3))
    sinkhorn_step(weight, momentum, example(0.002), 0.01)
    assert_close("momentum", momentum[0], [0.05, 0.1, 0])
    assert_close("change", weight[0] - 7, [-0.0013161, -0.00282628, 0], rel=1e-5, floor=1e-9)
    assert_close("rows", weight - 7, -0.0018 * np.array(MASKED), rel=1e-7, floor=1e-9)
    assert_same("no decay where masked", weight[[1, 4]], np.full((2, 3), 7.0))


def test_nesterov_by_hand():
    momentum = np.array([1.0])
    # M = 0.95 + 0.05 * 3 = 1.1; U = 0.95 * 1.1 + 0.05 * 3
    assert_close("U", damped_nesterov(momentum, np.array([3.0])), [1.195])
    assert_close("momentum", momentum, [1.1])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_all_zero_stays_all_zero(dtype):
    zero = np.zeros((5, 3), dtype)
    assert_same("balance", balance(zero), zero)
    assert_same("vectors", by_vectors(zero), zero)
    weight, momentum = zero + 2, zero.copy()
    sinkhorn_step(weight, momentum, zero, 0.01)
    assert_same("weight", weight, zero + 2)


@pytest.mark.parametrize("steps", [0, 2, 10])
def test_an_even_number_of_steps_is_refused(steps):
    for form in (balance, by_vectors):
        with pytest.raises(ValueError, match="odd number"):
            form(example(1.0), steps=steps)


# ---- the two forms --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (2, 2), (63, 4), (64, 65), (131, 7)])
@pytest.mark.parametrize("steps", [1, 3, 11])
def test_both_forms_equal_a_loop_over_entries(shape, steps):
    g = uneven(*shape)
    want = slow_balance(g, steps)
    assert_close("explicit", balance(g, steps), want, rel=1e-13, floor=1e-14)
    assert_close("vectors", by_vectors(g, steps=steps), want, rel=1e-12, floor=1e-13)


def test_vectors_equal_the_explicit_form_in_both_precisions():
    g = uneven(1001, 37)
    error = np.abs(by_vectors(g) - balance(g)).max()
    assert error < 1e-12
    g32 = g.astype(np.float32)
    assert by_vectors(g32).dtype == np.float32
    assert_close("float32", by_vectors(g32), balance(g32), rel=1e-6)


@pytest.mark.parametrize("shards", [2, 8])
def test_rows_may_lie_in_shards(shards):
    g = uneven(1001, 37)  # the shards are of unequal length
    assert_close("update", by_vectors(g, shards=shards), balance(g), rel=1e-12)
    pieces = np.array_split(g, shards)
    r, c = scaling_vectors(pieces)
    assert [len(x) for x in r] == [len(x) for x in pieces] and c.shape == (37,)


def test_a_column_without_gradient_does_not_grow_out_of_bounds():
    g = random(40, 8, dtype=np.float32)
    g[:, 3] = 0
    (r,), c = scaling_vectors([g])
    assert c[3] == 1 and np.isfinite(r).all()
    assert_close("update", by_vectors(g), balance(g), rel=1e-6)


# ---- what the update means ------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e6])
def test_the_size_of_the_gradient_does_not_matter(size):
    g = uneven(65, 16)
    assert_close("update", by_vectors(size * g), by_vectors(g), rel=1e-12)


def test_sizes_of_rows_and_columns_do_not_matter_once_converged():
    g = random(200, 10)
    rows, columns = np.exp(random(200, 1, seed=1)), np.exp(random(10, seed=2))
    assert_close("update", balance(rows * g * columns, steps=41), balance(g, steps=41), rel=1e-6)


def test_rms_of_rows_is_one_and_of_columns_nearly():
    g = uneven(3000, 16)
    update = balance(g)
    used = np.any(update != 0, axis=1)
    assert_close("rows", np.sqrt(np.mean(update[used] ** 2, axis=1)), np.ones(used.sum()))
    seen = np.any(g != 0, axis=0)
    columns = np.sqrt(np.mean(update[used][:, seen] ** 2, axis=0))
    # one column of 16 is empty, so the others share its part
    assert np.abs(columns / math.sqrt(16 / 15) - 1).max() < 2e-3
    over_all = np.sqrt(np.mean(update[:, seen] ** 2, axis=0))
    assert_close("over all rows", over_all / columns, np.full(15, math.sqrt(used.mean())))


def test_damping_the_momentum_changes_nothing_but_its_scale():
    weights = [random(50, 8), random(50, 8)]
    momenta = [np.zeros((50, 8)), np.zeros((50, 8))]
    for step in range(5):
        g = uneven(50, 8, seed=step)
        sinkhorn_step(weights[0], momenta[0], g, 0.01)
        momenta[1][:] = 0.95 * momenta[1] + g
        weights[1] -= 0.0018 * balance(0.95 * momenta[1] + g)
    assert_close("weight", weights[0], weights[1], rel=1e-13)
    assert_close("momentum", 20 * momenta[0], momenta[1])


@pytest.mark.parametrize(("hits", "idle"), [(300, 135), (1, 76)])
def test_an_idle_row_moves_at_full_size_until_its_momentum_has_decayed(hits, idle):
    # 0.95^135 = 1e-3; a single hit leaves 1 / 20 of the momentum of a row that is always hit
    weight, momentum = np.zeros((50, 6)), np.zeros((50, 6))
    for step in range(hits + idle + 20):
        g = np.sign(random(50, 6, seed=7))
        g[0] *= step < hits
        before = weight.copy()
        sinkhorn_step(weight, momentum, g, 1.0)
        sizes = np.sqrt(np.mean((weight - before) ** 2, axis=1))
        assert_close("rows", sizes[1:], np.full(49, 0.18))
        moves = step < hits + idle
        if abs(step - hits - idle) > 2:
            assert_close(f"idle row, step {step}", sizes[0], 0.18 if moves else 0)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rows_hit_are_as_good_as_a_dense_gradient(dtype):
    dense, sparse = ([random(30, 4, dtype=dtype), np.zeros((30, 4), dtype)] for _ in range(2))
    for step in range(4):
        rows = np.random.default_rng(step).permutation(30)[: 5 * step]
        values = random(len(rows), 4, seed=step, dtype=dtype)
        g = np.zeros((30, 4), dtype)
        g[rows] = values
        sinkhorn_step(*dense, g, 0.01)
        sinkhorn_step(*sparse, (rows, values), 0.01)
    assert_same("weight", sparse[0], dense[0])
    assert_same("momentum", sparse[1], dense[1])


# ---- wrong variants -------------------------------------------------------------------------

WRONG = {
    "columns first": ("axis=1 - k % 2", "axis=k % 2"),
    "nine steps": ("STEPS, TAU, EPS = 11", "STEPS, TAU, EPS = 9"),
    "a higher threshold": ("11, 1e-3,", "11, 2e-3,"),
    "a lower threshold": ("11, 1e-3,", "11, 5e-4,"),
    "no mask": ("(norms > tau * np.mean(norms))", "(norms >= 0)"),
    "mean of used rows only": ("np.mean(norms)", "(np.sum(norms) / np.sum(norms > 0))"),
    "no root of n": ("return math.sqrt(g.shape[1]) * u", "return u"),
    "root of the longer side": ("math.sqrt(g.shape[1])", "math.sqrt(g.shape[0])"),
    "large epsilon": ("1e-3, 1e-20", "1e-3, 1e-2"),
    "no mask on the vectors": ("(n > tau * mean)", "(n >= 0)"),
    "columns not shared": ("sum((x * x) @ s for", "next((x * x) @ s for"),
    "own mean per shard": ("(n > tau * mean)", "(n > tau * np.mean(n))"),
    "empty columns grow": (
        "np.where(column > 0, c / (c * column + eps), c)",
        "c / (c * column + eps)",
    ),
    "one column pass less": ("range(steps // 2)", "range(steps // 2 - 1)"),
    "no last row pass": ("return _row_pass(r, squares, c, eps), c", "return r, c"),
    "no Nesterov": ("    _add(g, grad, 1 - beta)\n", ""),
    "undamped gradient": ("    _add(momentum, grad, 1 - beta)\n", "    _add(momentum, grad, 1)\n"),
    "no gamma": ("(gamma * lr *", "(lr *"),
    "decays": ("    weight -= ", "    weight *= 1 - 0.1 * lr\n    weight -= "),
    "even steps allowed": ("if steps % 2 == 0", "if False"),
}


def check(module):
    """A short version of the tests above."""
    for fifth, want in [(0.002, MASKED), (0.004, ACTIVE)]:
        g = example(fifth)
        assert_close("explicit", module.balance(g), want, rel=1e-8, floor=1e-8)
        assert_close("vectors", by_vectors(g, module), want, rel=1e-8, floor=1e-8)
    assert module.balance(example(0.0022))[4].any()
    g = uneven(64, 9)
    assert_close("loop", module.balance(g), slow_balance(g), rel=1e-12)
    g[40:] *= 1e-4
    with np.errstate(all="ignore"):
        assert_close("shards", by_vectors(g, module, shards=4), balance(g), rel=1e-12)
        g = g.astype(np.float32)
        assert_close("float32", by_vectors(g, module), balance(g), rel=1e-5)
    weight, momentum = np.full((5, 3), 7.0), np.zeros((5, 3))
    module.sinkhorn_step(weight, momentum, example(0.002), 0.01)
    assert_close("change", weight - 7, -0.0018 * np.array(MASKED), rel=1e-7, floor=1e-9)
    assert_close("momentum", momentum, 0.05 * example(0.002))
    assert_close("U", module.damped_nesterov(np.ones(1), np.array([3.0])), [1.195])
    with pytest.raises(ValueError):
        module.balance(example(1.0), steps=4)


def test_the_right_module_passes_the_check():
    check(sinkhorn_update)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variant_is_noticed(name):
    wrong = mutated(sinkhorn_update, *WRONG[name])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(wrong)
