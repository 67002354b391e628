"""Routing by hand, experts and their sum by a float64 loop, and what the bias may not touch."""

import math

import numpy as np
import pytest
from compare import assert_any_layout, assert_close, assert_same, repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41.formats import round_bf16
from dsv41.moe import expert, moe_experts, route
from dsv41.quant import ACTIVATION_FP8, FLOAT32, OFFICIAL, quantize_weight

INVARIANT = FLOAT32.but(batch_invariant=True)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def text(count):
    return np.zeros(count, bool)


def route_logits(logits, bias, experts, **changes):
    """`route` with an identity gate, so that x holds the logits themselves."""
    x, bias = np.float32(logits), np.float32(bias)
    gate = {"weight": np.eye(x.shape[1], dtype=np.float32), "bias": bias}
    options = {"factor": 1.5, "normalize": True, "numerics": FLOAT32} | changes
    return route(x, gate, text(len(x)), experts, **options)


def softplus_root(l):
    return math.sqrt(math.log1p(math.exp(-abs(l))) + max(l, 0))


# ---- routing --------------------------------------------------------------------------------


def test_the_bias_chooses_and_does_not_weigh():
    chosen, weight, biased = route_logits([[2, 1, 0, -1]], [0, 0, 1, 2], 2)
    assert_same("experts", chosen, np.array([[3, 2]]))  # best biased score first
    assert_close("weights", weight, [[0.6030133196, 0.8969866804]], rel=1e-6)
    scores = [softplus_root(l) for l in (2, 1, 0, -1)]
    assert_close("biased", biased, [np.add(scores, [0, 0, 1, 2])], rel=1e-6)


def test_without_a_bias_the_largest_logits_win():
    chosen, weight, _ = route_logits([[2, 1, 0, -1]], [0, 0, 0, 0], 2)
    assert_same("experts", chosen, np.array([[0, 1]]))
    a, b = softplus_root(2), softplus_root(1)
    assert_close("weights", weight, [[1.5 * a / (a + b), 1.5 * b / (a + b)]], rel=1e-6)


def test_weights_stay_when_another_bias_chooses_the_same_experts():
    logits = random(5, 8)
    chosen, weight, _ = route_logits(logits, [0] * 8, 3)
    again, same, _ = route_logits(logits, [0.5] * 8, 3)
    assert_same("experts", again, chosen)
    assert_same("weights", same, weight)


@pytest.mark.parametrize(
    ("logits", "bias", "want"),
    [
        ([1, 1, 1, 1, 1], [0] * 5, [0, 1, 2]),
        ([0, 5, 5, 5, 5], [0] * 5, [1, 2, 3]),
        ([5, 1, 9, 1, 1], [0] * 5, [2, 0, 1]),
        ([0, 0, 0, 0, 0], [-1, 1, 0, 1, 0], [1, 3, 2]),
    ],
)
def test_equal_biased_scores_go_to_the_lower_expert(logits, bias, want):
    chosen, _, _ = route_logits([logits], bias, 3)
    assert_same("experts", chosen, np.array([want]))


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 65])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (8, 8), (384, 6)])
def test_route_equals_a_sort(tokens, experts, k):
    x, p = random(tokens, 16), {"weight": random(experts, 16, seed=1)}
    p["bias"] = random(experts, seed=2)
    chosen, weight, biased = route(x, p, text(tokens), k, 1.5, True, FLOAT32)
    assert chosen.shape == weight.shape == (tokens, k) and biased.shape == (tokens, experts)
    assert chosen.dtype == np.int64 and weight.dtype == biased.dtype == np.float32
    for t in range(tokens):
        logits = p["weight"].astype(np.float64) @ x[t]
        scores = [softplus_root(l) for l in logits]
        order = sorted(range(experts), key=lambda e: (-(scores[e] + float(p["bias"][e])), e))[:k]
        assert_same("experts", chosen[t], np.array(order))
        total = sum(scores[e] for e in order)
        assert_close("weights", weight[t], [1.5 * scores[e] / total for e in order])


def test_images_choose_by_their_own_bias():
    gate = {"weight": np.eye(4, dtype=np.float32)}
    gate |= {"bias": np.float32([0, 0, 0, 9]), "bias_vl": np.float32([9, 0, 0, 0])}
    x = np.zeros((3, 4), np.float32)
    # a mask read from bytes: anything but 0 is an image
    mask = np.uint8([0, 3, 1]).view(bool)
    chosen, _, _ = route(x, gate, mask, 1, 1.5, True, FLOAT32)
    assert_same("experts", chosen, np.array([[3], [0], [0]]))
    del gate["bias_vl"]
    chosen, _, _ = route(x, gate, mask, 1, 1.5, True, FLOAT32)
    assert_same("without one", chosen, np.array([[3], [3], [3]]))


def test_a_single_expert_or_normalize_off_keeps_the_score_times_the_factor():
    _, weight, _ = route_logits([[2, 1, 0, -1]], [0] * 4, 1)
    assert_close("one", weight, [[1.5 * softplus_root(2)]], rel=1e-6)
    _, weight, _ = route_logits([[2, 1, 0, -1]], [0] * 4, 2, normalize=False)
    assert_close("off", weight, [[1.5 * softplus_root(2), 1.5 * softplus_root(1)]], rel=1e-6)


def test_tiny_scores_are_normalised_and_vanishing_ones_give_zero_not_nan():
    _, weight, _ = route_logits([[-60, -60, -90, -90]], [0] * 4, 2)
    assert_close("tiny", weight, [[0.75, 0.75]], rel=1e-6)
    _, weight, _ = route_logits([[-150, -150]], [0, 0], 2)
    share = 1.5 * math.exp(-75) / (2 * math.exp(-75) + 1e-20)  # the 1e-20 of the denominator
    assert_close("vanishing", weight, [[share, share]], rel=1e-5, floor=0)


def test_router_scores_are_never_rounded_to_bf16():
    x, p = random(5, 16), {"weight": random(8, 16, seed=1), "bias": random(8, seed=2)}
    plain = route(x, p, text(5), 2, 1.5, True, FLOAT32)
    for a, b in zip(plain, route(x, p, text(5), 2, 1.5, True, OFFICIAL), strict=True):
        assert_same("route", b, a)


@repeatable
@given(seed=st.integers(0, 999))
def test_weights_are_positive_and_sum_to_the_factor(seed):
    _, weight, _ = route_logits(3 * random(4, 8, seed=seed), random(8, seed=seed + 1), 3)
    assert (weight > 0).all()
    assert_close("sum", weight.sum(axis=1), [1.5] * 4, rel=1e-6)


def test_float64_settings_do_not_leak():
    _, weight, biased = route_logits([[2, 1, 0, -1]], [0] * 4, 2, factor=np.float64(1.5))
    assert weight.dtype == biased.dtype == np.float32
    x, p = random(3, 32), ffn_params()
    chosen, weight = random_choice(3)
    assert moe_experts(x, p, chosen, weight, np.float64(1.0), OFFICIAL).dtype == np.float32


# ---- experts --------------------------------------------------------------------------------


def swiglu_params(seed, hidden=32, width=64):
    shapes = {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}
    return {
        name: {"weight": random(*shape, seed=10 * seed + i) / np.float32(4)}
        for i, (name, shape) in enumerate(shapes.items())
    }


def ffn_params(experts=4, shared=True):
    p = {"experts": {e: swiglu_params(e) for e in range(experts)}}
    return p | {"shared_experts": swiglu_params(99)} if shared else p


def slow_expert(x, p, limit, weight=1.0):
    """One token through one expert in float64."""
    w1, w3, w2 = (p[name]["weight"].astype(np.float64) for name in ("w1", "w3", "w2"))
    gate, up = w1 @ x, w3 @ x
    hidden = []
    for a, u in zip(gate, up, strict=True):
        a, u = min(a, limit), max(-limit, min(u, limit))
        hidden.append(a / (1 + math.exp(-a)) * u * weight)
    return w2 @ hidden


def slow_moe(x, p, chosen, weight, limit):
    y = np.zeros(x.shape)
    for t in range(len(x)):
        for e, w in zip(chosen[t].tolist(), weight[t].tolist(), strict=True):
            y[t] += slow_expert(x[t].astype(np.float64), p["experts"][e], limit, w)
        if "shared_experts" in p:
            y[t] += slow_expert(x[t].astype(np.float64), p["shared_experts"], limit)
    return y


def random_choice(tokens, experts=4, k=2, seed=0):
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)] or [np.zeros(k, int)])
    return chosen[:tokens], rng.random((tokens, k)).astype(np.float32)


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 65])
@pytest.mark.parametrize("shared", [True, False])
def test_moe_equals_the_weighted_sum_over_chosen_experts(tokens, shared):
    x, p = 2 * random(tokens, 32), ffn_params(shared=shared)
    chosen, weight = random_choice(tokens)
    y = moe_experts(x, p, chosen, weight, 1.0, FLOAT32)
    assert y.shape == (tokens, 32) and y.dtype == np.float32
    assert_close("y", y, slow_moe(x, p, chosen, weight, 1.0))


def test_experts_without_tokens_are_not_run():
    x, p = random(5, 32), ffn_params(shared=False)
    chosen, weight = np.array([[0, 2], [2, 0], [0, 2], [0, 2], [2, 0]]), random(5, 2, seed=1)
    want = slow_moe(x, p, chosen, weight, 10.0)
    for idle in (1, 3):
        del p["experts"][idle]
    y = moe_experts(x, p, chosen, weight, 10.0, FLOAT32)
    assert_close("y", y, want, rel=1e-6)


@pytest.mark.parametrize("number", [-1, 4])
def test_an_expert_number_out_of_range_is_an_error(number):
    x, p = random(1, 32), ffn_params()
    with pytest.raises((KeyError, ValueError)):
        moe_experts(x, p, np.array([[0, number]]), np.ones((1, 2), np.float32), 10.0, FLOAT32)


def test_the_shared_expert_is_clamped_too():
    x, p = 20 * random(3, 32), ffn_params()
    none = np.zeros((3, 0), np.int64)
    y = moe_experts(x, p, none, np.zeros((3, 0), np.float32), 0.5, FLOAT32)
    assert_close("clamped", y, slow_moe(x, p, none, none, 0.5))
    free = moe_experts(x, p, none, np.zeros((3, 0), np.float32), 0, FLOAT32)
    assert np.abs(free - y).max() > 1


def test_official_expert_rounds_at_each_released_step():
    x, p = round_bf16(random(65, 32)), {}
    for name, weight in swiglu_params(0).items():
        p[name] = {"weight": quantize_weight(weight["weight"], "rows")}
    w1, w3, w2 = (p[name]["weight"].dense().astype(np.float64) for name in ("w1", "w3", "w2"))
    weight = np.random.default_rng(1).random(65).astype(np.float32)

    def stored(v):
        return round_bf16(np.asarray(v, np.float32))

    codes = ACTIVATION_FP8.fake(x).astype(np.float64)
    gate, up = (stored(codes @ w.T).astype(np.float64) for w in (w1, w3))
    gate, up = np.minimum(gate, 1.0), np.clip(up, -1.0, 1.0)
    # the router's weight goes in before the hidden vector is stored and quantised
    hidden = stored(gate / (1 + np.exp(-gate)) * up * weight[:, None])
    want = stored(ACTIVATION_FP8.fake(hidden).astype(np.float64) @ w2.T)
    got = expert(x, p, 1.0, OFFICIAL, weight)
    assert_close("y", got, want, rel=1e-3, floor=0)
    assert np.mean(got != want) < 0.01  # a last bit of exp() may flip a code, but seldom


def test_a_router_weight_of_one_and_none_are_the_same():
    x, p = random(3, 32), swiglu_params(0)
    ones = np.ones(3, np.float32)
    assert_same("y", expert(x, p, 10, OFFICIAL, ones), expert(x, p, 10, OFFICIAL))


def test_experts_are_summed_in_ascending_order_and_the_shared_one_last():
    # 1e8, 1 and -1e8 in float32: only (1e8 - 1e8) + 1 keeps the 1
    def constant(value):
        # silu(20) * 1 is 20 to the last bit
        w2 = np.zeros((32, 32), np.float32)
        w2[0, 0] = value / 20
        w1, w3 = np.zeros((2, 32, 32), np.float32)
        w1[0, 0], w3[0, 1] = 20, 1
        return {"w1": {"weight": w1}, "w3": {"weight": w3}, "w2": {"weight": w2}}

    x = np.zeros((1, 32), np.float32)
    x[0, :2] = 1
    weight = np.ones((1, 2), np.float32)
    for order, want in [((1e8, -1e8, 1), 1), ((1e8, 1, -1e8), 0)]:
        p = {"experts": {e: constant(v) for e, v in enumerate(order[:2])}}
        p["shared_experts"] = constant(order[2])
        for chosen in ([[0, 1]], [[1, 0]]):
            y = moe_experts(x, p, np.array(chosen), weight, 0, FLOAT32)
            assert_close(f"{order}", y[0, 0], want, rel=1e-5)


def test_the_sum_is_stored_as_bf16_once():
    x, p = random(9, 32), ffn_params()
    chosen, weight = random_choice(9)
    unrounded = FLOAT32.but(activation=ACTIVATION_FP8)
    y = moe_experts(x, p, chosen, weight, 10.0, OFFICIAL)
    assert_same("bf16", round_bf16(y), y)
    assert_close("y", y, moe_experts(x, p, chosen, weight, 10.0, unrounded), rel=2e-2)


# ---- rows and strides -----------------------------------------------------------------------


@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=lambda n: n.name)
def test_a_token_alone_has_the_bits_it_has_in_a_batch(numerics):
    numerics = numerics.but(batch_invariant=True)
    x, p = random(9, 32), ffn_params()
    gate = {"weight": random(4, 32, seed=5), "bias": random(4, seed=6)}

    def layer(x):
        chosen, weight, biased = route(x, gate, text(len(x)), 2, 1.5, True, numerics)
        return chosen, weight, biased, moe_experts(x, p, chosen, weight, 1.0, numerics)

    together = layer(x)
    for t in range(9):
        for part, alone in enumerate(layer(x[t : t + 1])):
            assert_same(f"token {t} part {part}", alone[0], together[part][t])


@pytest.mark.parametrize("numerics", [FLOAT32, INVARIANT, OFFICIAL], ids=["f32", "inv", "bf16"])
def test_strides_of_the_tokens_do_not_matter(numerics):
    x, p = random(9, 32), ffn_params()
    gate = {"weight": random(4, 32, seed=5), "bias": random(4, seed=6)}
    chosen, weight = random_choice(9)
    assert_any_layout("route", lambda x: route(x, gate, text(9), 2, 1.5, True, numerics), x)
    assert_any_layout("moe", lambda x: moe_experts(x, p, chosen, weight, 1.0, numerics), x)
    assert_any_layout("expert", lambda x: expert(x, p["experts"][0], 1.0, numerics), x)


# ---- nothing to do ----------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", [FLOAT32, INVARIANT, OFFICIAL], ids=["f32", "inv", "bf16"])
@pytest.mark.parametrize("shared", [True, False])
def test_no_tokens_give_empty_results_of_the_right_width(numerics, shared):
    gate = {"weight": random(4, 32, seed=5), "bias": random(4, seed=6)}
    gate["bias_vl"] = random(4, seed=7)
    x = np.zeros((0, 32), np.float32)
    chosen, weight, biased = route(x, gate, text(0), 2, 1.5, True, numerics)
    assert chosen.shape == weight.shape == (0, 2) and biased.shape == (0, 4)
    assert chosen.dtype == np.int64 and weight.dtype == biased.dtype == np.float32
    y = moe_experts(x, ffn_params(shared=shared), chosen, weight, 1.0, numerics)
    assert y.shape == (0, 32) and y.dtype == np.float32
    alone = expert(x, swiglu_params(0), 1.0, numerics, np.zeros(0, np.float32))
    assert alone.shape == (0, 32) and alone.dtype == np.float32


@pytest.mark.parametrize("numerics", [FLOAT32, INVARIANT, OFFICIAL], ids=["f32", "inv", "bf16"])
def test_an_expert_without_tokens_adds_nothing_whatever_it_holds(numerics):
    x, p = random(3, 32), ffn_params()
    chosen, weight = np.array([[2, 0], [0, 2], [2, 0]]), random(3, 2, seed=1)
    want = moe_experts(x, p, chosen, weight, 1.0, numerics)
    for idle in (1, 3):
        for part in p["experts"][idle].values():
            part["weight"] = np.full_like(part["weight"], np.nan)
    assert_same("y", moe_experts(x, p, chosen, weight, 1.0, numerics), want)
    none = np.zeros((3, 0), np.int64)
    only = moe_experts(x, p, none, np.zeros((3, 0), np.float32), 1.0, numerics)
    assert_same("shared alone", only, expert(x, p["shared_experts"], 1.0, numerics))
