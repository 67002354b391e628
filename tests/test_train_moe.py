"""Gradients of experts and router; the choice itself stays where it is."""

import numpy as np
import pytest
from compare import assert_close, assert_same
from test_train_difference import check, random

from dsv41.moe import expert, moe_experts, route
from dsv41.quant import FLOAT32
from dsv41.train.moe import expert_backward, moe_experts_backward, route_backward

LIMIT = 0.8


def swiglu_parameters(width, hidden, seed=0):
    shapes = {"w1": (hidden, width), "w3": (hidden, width), "w2": (width, hidden)}
    draws = {n: random(*s, seed=seed + i) for i, (n, s) in enumerate(shapes.items())}
    return {n: {"weight": w} for n, w in draws.items()}


def gate_parameters(experts, width):
    return {"weight": random(experts, width), "bias": random(experts, seed=5)}


@pytest.mark.parametrize(("k", "normalize"), [(2, True), (2, False), (1, True), (4, True)])
def test_route(k, normalize):
    rest = k, 1.5, normalize, FLOAT32
    x, p, is_image = random(3, 5), gate_parameters(4, 5), np.array([False, True, False])
    p["bias_vl"] = random(4, seed=6)
    chosen = route(np.float32(x), p, is_image, *rest)[0]

    def backward(dweight, x, p):
        nothing = np.zeros((3, 4))
        dx, grads = route_backward(dweight, nothing, x, p, chosen, *rest[1:])
        return dx, grads

    check("route", lambda x, p: route(x, p, is_image, *rest)[1], backward, {"x": x, "p": p})


def test_a_gradient_of_all_scores_joins_that_of_the_chosen_ones():
    rest = 1.5, True, FLOAT32
    x, p = random(2, 5), gate_parameters(4, 5)
    p["bias"] *= 0  # then biased scores are the scores
    text = np.zeros(2, bool)
    chosen = route(np.float32(x), p, text, 2, *rest)[0]
    check(
        "route",
        lambda x, p: route(x, p, text, 2, *rest)[1:],
        lambda dweight, dscores, x, p: route_backward(dweight, dscores, x, p, chosen, *rest),
        {"x": x, "p": p},
    )


def test_equal_weights_of_two_experts_cannot_both_grow():
    """w = 1.5 s / (s0 + s1): pushing both alike pushes the sum, which is always 1.5."""
    p = {"weight": np.eye(2), "bias": np.zeros(2)}
    args = np.zeros((1, 2)), np.array([[0.3, -0.2]]), p, np.array([[0, 1]]), 1.5, True, FLOAT32
    assert_close("dx", route_backward(np.ones((1, 2)), *args)[0], [[0, 0]], floor=1e-7)
    assert route_backward(np.array([[1.0, 0]]), *args)[0][0, 0] > 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
def test_expert(tokens, weighted):
    inputs = {"x": random(tokens, 4), "weight": random(tokens), "p": swiglu_parameters(4, 3)}

    def function(x, p, weight=None):
        return expert(x, p, LIMIT, FLOAT32, weight)

    def backward(dy, x, p, weight=None):
        return expert_backward(dy, x, p, LIMIT, FLOAT32, weight)[:: 1 if weighted else 2]

    by = ("x", "weight", "p")
    if not weighted:
        del inputs["weight"]
        by = ("x", "p")
    check("expert", function, backward, inputs, by)


@pytest.mark.parametrize("shared", [False, True])
def test_experts(shared):
    chosen = np.array([[0, 2], [2, 4], [4, 0]])  # nobody asks for 1 and 3
    p = {"experts": {e: swiglu_parameters(4, 3, seed=10 * e) for e in range(5)}}
    if shared:
        p["shared_experts"] = swiglu_parameters(4, 3, seed=99)
    check(
        "experts",
        lambda x, weight, p: moe_experts(x, p, chosen, weight, LIMIT, FLOAT32),
        lambda dy, x, weight, p: moe_experts_backward(dy, x, p, chosen, weight, LIMIT, FLOAT32),
        {"x": random(3, 4), "weight": random(3, 2), "p": p},
    )


def test_an_expert_that_nobody_chose_gets_zeros():
    p = {"experts": {e: swiglu_parameters(4, 3) for e in range(2)}}
    args = random(2, 4), random(2, 4), p, np.array([[1], [1]]), np.ones((2, 1)), LIMIT, FLOAT32
    grads = moe_experts_backward(*args)[2]["experts"]
    assert_same("expert 0", grads[0]["w2"]["weight"], np.zeros((4, 3)))
    assert np.any(grads[1]["w2"]["weight"] != 0)
