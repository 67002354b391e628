"""Gradients of norm, linear and gates; what rounding lets through; sums of rows that repeat."""

import numpy as np
import pytest
from compare import assert_close, assert_same, repeatable
from hypothesis import given
from hypothesis import strategies as st
from test_train_difference import check, random

from dsv41.ops import linear_fp8, rmsnorm, sqrt_softplus, swiglu
from dsv41.quant import ACTIVATION_FP8, FLOAT, FLOAT32, MAIN_KV_FP4, OFFICIAL
from dsv41.train.ops import (
    add_grads,
    add_rows,
    linear_fp8_backward,
    rmsnorm_backward,
    sqrt_softplus_backward,
    straight_through,
    sum_rows,
    swiglu_backward,
)


@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (2, 3, 5), (0, 4)])
@pytest.mark.parametrize("eps", [1e-20, 0.1])
def test_rmsnorm(shape, eps):
    check(
        "rmsnorm",
        lambda x, weight: rmsnorm(x, weight, eps, FLOAT32),
        lambda dy, x, weight: rmsnorm_backward(dy, x, weight, eps),
        {"x": random(*shape), "weight": random(shape[-1], seed=1)},
    )


def test_rmsnorm_by_hand():
    """x = (3, 4): rms 3.5355; moving along x changes nothing, as a norm's result has one length."""
    x, weight = np.array([[3.0, 4.0]]), np.ones(2)
    dx, dweight = rmsnorm_backward(np.array([[1.0, 0.0]]), x, weight, 0.0)
    assert_close("dx", dx, [[16 / 25 / 12.5**0.5, -12 / 25 / 12.5**0.5]])
    assert_close("dweight", dweight, [3 / 12.5**0.5, 0])
    assert abs(np.sum(dx * x)) < 1e-12


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_linear(tokens):
    check(
        "linear",
        lambda x, weight: linear_fp8(x, weight, FLOAT32),
        lambda dy, x, weight: linear_fp8_backward(dy, x, weight, FLOAT32),
        {"x": random(tokens, 4), "weight": random(2, 4, seed=1)},
    )


def test_a_quantised_linear_uses_the_rounded_input_for_its_weight_only():
    x, weight, dy = (np.float32(random(*s)) for s in ((3, 32), (2, 32), (3, 2)))
    dx, dweight = linear_fp8_backward(dy, x, weight, OFFICIAL)
    assert_close("dx", dx, dy @ weight)
    assert_close("dweight", dweight, dy.T @ ACTIVATION_FP8.fake(x))
    assert not np.allclose(dweight, dy.T @ x, atol=1e-4)


@pytest.mark.parametrize("limit", [0, None, 0.7])
def test_swiglu(limit):
    check(
        "swiglu",
        lambda gate, up: swiglu(gate, up, limit),
        lambda dy, gate, up: swiglu_backward(dy, gate, up, limit),
        {"gate": 2 * random(4, 5), "up": 2 * random(4, 5, seed=1)},
    )


def test_the_clamp_stops_a_large_gate_and_both_ends_of_up_and_lets_the_limit_itself_move():
    gate, up = np.array([2.0, -2.0, 1.0, 0.5, 0.5]), np.array([0.5, 0.5, 0.5, -2.0, 2.0])
    dgate, dup = swiglu_backward(np.ones(5), gate, up, 1.0)
    assert (dgate == 0).tolist() == [True, False, False, False, False]
    assert (dup == 0).tolist() == [False, False, False, True, True]


def test_sqrt_softplus():
    check(
        "sqrt_softplus",
        lambda x: sqrt_softplus(x),
        lambda dy, x: sqrt_softplus_backward(dy, x),
        {"x": np.linspace(-15, 15, 31)},
    )


def test_the_slope_of_sqrt_softplus_is_half_its_value_far_below_zero():
    x = np.float32([-20.5, -60, -150, -250])
    slope = sqrt_softplus_backward(np.ones(4, np.float32), x)
    assert_close("slope", slope, sqrt_softplus(x) / 2, floor=0)
    assert np.isfinite(sqrt_softplus_backward(1.0, np.float32([-1e4, 1e4]))).all()


# ---- rounding ---------------------------------------------------------------------------------


def test_only_what_is_beyond_the_range_of_the_main_kv_format_gets_no_gradient():
    x, dy = np.float32([[0, 1e-9, 6, -2688, 2689, -3e4] + [1] * 10]), np.full((1, 16), 2.0)
    want = np.where(np.abs(x) > 2688, 0, 2.0)
    assert_same("main KV", straight_through(dy, x, MAIN_KV_FP4), want)
    for fmt in (FLOAT, ACTIVATION_FP8):
        assert_same("no end", straight_through(dy, x, fmt), dy)


def test_the_format_cuts_exactly_there():
    fake = MAIN_KV_FP4.fake(np.float32([[2688] + [0] * 15, [5000] + [0] * 15]))
    assert fake[:, 0].tolist() == [2688, 2688]


# ---- sums of rows -----------------------------------------------------------------------------


def test_rows_that_repeat_are_added_and_empty_ones_left_out():
    values = np.array([[1.0, 10], [2, 20], [4, 40], [8, 80]])
    rows, sums = sum_rows(values, np.array([7, -1, 2, 7]))
    assert rows.tolist() == [2, 7]
    assert sums.tolist() == [[4, 40], [9, 90]]


@pytest.mark.parametrize("rows", [[], [-1, -1]])
def test_no_rows_at_all(rows):
    found, sums = sum_rows(np.ones((len(rows), 3)), np.array(rows, np.int64))
    assert found.shape == (0,) and sums.shape == (0, 3)
    add_rows(np.zeros((0, 3)), np.ones((2, 0, 3)), np.zeros((2, 0), np.int64))


@repeatable
@given(st.lists(st.integers(-1, 6), max_size=30), st.integers(0, 1000))
def test_rows_equal_a_loop(rows, seed):
    values = np.random.default_rng(seed).normal(size=(len(rows), 2))
    want, total = np.zeros((7, 2)), np.zeros((7, 2))
    for value, row in zip(values, rows, strict=True):
        if row >= 0:
            want[row] += value
    add_rows(total, values, np.array(rows, np.int64))
    assert_close("total", total, want)


def test_a_row_s_sum_does_not_depend_on_the_other_rows():
    rows, values = np.array([3, 1, 3, 3, 0]), np.float32(random(5, 4))
    alone = sum_rows(values[rows == 3], rows[rows == 3])[1]
    assert_same("row 3", sum_rows(values, rows)[1][-1:], alone)


def test_nested_gradients_are_added_by_name():
    one = {"a": {"w": np.array(1.0)}, "b": np.array(2.0)}
    other = {"a": {"w": np.array(10.0), "v": np.array(5.0)}}
    total = add_grads(one, other)
    assert total["a"]["w"] == 11 and total["a"]["v"] == 5 and total["b"] == 2
    assert one["a"]["w"] == 1
