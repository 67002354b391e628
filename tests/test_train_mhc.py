"""Gradients of Sinkhorn through all its passes, and of the three sets of mixing coefficients."""

import numpy as np
import pytest
from compare import assert_close
from oracles import small_config
from test_train_difference import check, random

from dsv41.mhc import hc_coefficients, hc_collapse, hc_update, sinkhorn
from dsv41.quant import FLOAT32
from dsv41.train.mhc import (
    hc_coefficients_backward,
    hc_collapse_backward,
    hc_update_backward,
    sinkhorn_backward,
)


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_sinkhorn(iterations, eps):
    check(
        "sinkhorn",
        lambda logits: sinkhorn(logits, iterations, eps),
        lambda d, logits: sinkhorn_backward(d, logits, iterations, eps),
        {"logits": 2 * random(2, 3, 3)},
    )


def test_sinkhorn_of_one_stream_cannot_be_moved():
    assert_close(
        "dlogits", sinkhorn_backward(np.ones((1, 1, 1)), np.ones((1, 1, 1)), 3, 0.0), [[[0]]]
    )


def test_a_doubly_stochastic_matrix_does_not_notice_whole_rows_or_columns():
    """Adding a number to a row or column of the logits is divided out, so dlogits sums to 0."""
    dlogits = sinkhorn_backward(random(4, 4), random(4, 4, seed=1), 200, 0.0)
    assert_close("rows", dlogits.sum(axis=1), np.zeros(4), floor=1e-9)
    assert_close("columns", dlogits.sum(axis=0), np.zeros(4), floor=1e-9)


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_coefficients(tokens):
    config, s, width = small_config(hc_sinkhorn_iters=3), 3, 4
    inputs = {
        "streams": random(tokens, s, width),
        "fn": random(15, s * width) / 3,
        "base": random(15),
        "scale": 1 + random(3) / 3,
    }
    check(
        "coefficients",
        lambda **x: hc_coefficients(**x, config=config, numerics=FLOAT32),
        lambda *d, **x: hc_coefficients_backward(*d, **x, config=config, numerics=FLOAT32),
        inputs,
    )


def test_collapse():
    check(
        "collapse",
        lambda streams, pre: hc_collapse(streams, pre, FLOAT32),
        hc_collapse_backward,
        {"streams": random(2, 3, 4), "pre": random(2, 3)},
    )


def test_update():
    check(
        "update",
        lambda **x: hc_update(**x, numerics=FLOAT32),
        hc_update_backward,
        {
            "streams": random(2, 3, 4),
            "y": random(2, 4),
            "post": random(2, 3),
            "comb": random(2, 3, 3),
        },
    )
