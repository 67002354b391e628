"""Hyper-connections: exact Sinkhorn values, coefficients by a float64 loop, the two einsums."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from compare import assert_any_layout, assert_close, assert_same, repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41.formats import round_bf16
from dsv41.mhc import hc_coefficients, hc_collapse, hc_update, initial_streams, sinkhorn
from dsv41.quant import FLOAT32, OFFICIAL

CONFIG = SimpleNamespace(rms_norm_eps=1e-20, hc_eps=1e-6, hc_sinkhorn_iters=20)
INVARIANT = FLOAT32.but(batch_invariant=True)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def slow_sinkhorn(logits, iterations, eps):
    """Float64, one entry at a time."""
    n = len(logits)
    b = [[0.0] * n for _ in range(n)]
    for j in range(n):
        top = max(logits[j])
        weights = [math.exp(float(v) - float(top)) for v in logits[j]]
        b[j] = [w / sum(weights) + eps for w in weights]
    for step in range(iterations):
        if step:
            for j in range(n):
                total = sum(b[j]) + eps
                b[j] = [v / total for v in b[j]]
        for k in range(n):
            total = sum(b[j][k] for j in range(n)) + eps
            for j in range(n):
                b[j][k] /= total
    return b


# ---- sinkhorn -------------------------------------------------------------------------------

LOGITS = [[1, 0, -1, 2], [0.5, 0.5, 0, -0.5], [3, -2, 1, 0], [0, 1, 2, -3]]


def test_sinkhorn_values_at_the_released_epsilon():
    want = [
        [0.1024453, 0.1224406, 0.0275916, 0.7475215],
        [0.1551985, 0.5042108, 0.1873281, 0.1532616],
        [0.7018189, 0.0153657, 0.1890172, 0.0937972],
        [0.0405364, 0.3579818, 0.5960621, 0.0054187],
    ]
    assert_close("b", sinkhorn(np.float32(LOGITS), 20, 1e-6), want, rel=3e-7, floor=1e-7)


def test_sinkhorn_adds_epsilon_inside_every_division():
    # at 1e-6 a misplaced bracket hides behind rounding, at 1e-2 it does not
    want = [
        [0.1100513, 0.1273776, 0.0351391, 0.7174320],
        [0.1636363, 0.4813388, 0.1895078, 0.1555171],
        [0.6702508, 0.0363492, 0.1828060, 0.1005941],
        [0.0460616, 0.3449344, 0.5825471, 0.0164569],
    ]
    b = sinkhorn(np.float32(LOGITS), 20, 1e-2)
    assert_close("b", b, want, rel=3e-7, floor=1e-7)
    assert_close("columns", b.sum(axis=0), [0.99] * 4, rel=1e-4)


def test_sinkhorn_of_one_and_of_two_streams():
    b = sinkhorn(np.float32([[0.3, -0.2], [0.1, 0.7]]), 20, 1e-6)
    assert_close("two", b, [[0.6341347, 0.3658643], [0.3658643, 0.6341347]], rel=3e-7)
    assert_close("one", sinkhorn(np.float32([[5]]), 20, 1e-6), [[0.999999]], rel=1e-7, floor=1e-7)


def test_sinkhorn_of_the_published_check_matrices():
    zero = sinkhorn(np.zeros((4, 4), np.float32), 20, 1e-6)
    assert_close("zero", zero, np.full((4, 4), 0.24999976), rel=1e-7, floor=1e-7)
    logits = np.float32([[1, 2, 3, 4], [0, 0, 0, 0], [4, 3, 2, 1], [1, 0, 1, 0]])
    want = [
        [0.02378, 0.120209, 0.248867, 0.607143],
        [0.180269, 0.335244, 0.25533, 0.229156],
        [0.515696, 0.352811, 0.098853, 0.032639],
        [0.280255, 0.191735, 0.396949, 0.131061],
    ]
    assert_close("b", sinkhorn(logits, 20, 1e-6), want, rel=1e-6, floor=6e-7)


def test_sinkhorn_of_huge_logits_stays_finite():
    b = sinkhorn(1000 * np.eye(4, dtype=np.float32), 20, 1e-6)
    assert_close("diagonal", b, 0.999996 * np.eye(4) + 1e-6 * (1 - np.eye(4)), rel=3e-7)
    rows = [[1000, -1000, 0, 0], [1000, 0, 0, 0], [0, 0, 0, 0], [-1000, -1000, -1000, -1000]]
    want = [[0.4999985, *[0.1666589] * 3]] * 2 + [[0.000001, *[0.3333406] * 3]] * 2
    assert_close("mixed", sinkhorn(np.float32(rows), 20, 1e-6), want, rel=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_equals_a_float64_loop(n, iterations):
    logits = 3 * random(5, n, n)
    want = [slow_sinkhorn(z.tolist(), iterations, 1e-6) for z in logits]
    b = sinkhorn(logits, iterations, 1e-6)
    assert b.dtype == np.float32
    assert_close("b", b, want, rel=2e-6)


@repeatable
@given(seed=st.integers(0, 999), size=st.floats(0, 50))
def test_sinkhorn_columns_sum_to_one_and_nothing_is_amplified(seed, size):
    b = sinkhorn(np.float32(size) * random(3, 4, 4, seed=seed), 20, 1e-6)
    assert (b >= 0).all()
    assert_close("columns", b.sum(axis=-2), np.ones((3, 4)), rel=5e-6)
    assert (b.sum(axis=-1) <= 4).all()


@repeatable
@given(seed=st.integers(0, 999))
def test_sinkhorn_ignores_a_constant_added_to_a_row(seed):
    logits = random(4, 4, seed=seed)
    shifted = logits + 3 * random(4, 1, seed=seed + 1)
    assert_close("b", sinkhorn(shifted, 20, 1e-6), sinkhorn(logits, 20, 1e-6), rel=2e-6)


def test_sinkhorn_handles_each_matrix_alone():
    logits = random(9, 4, 4)
    together = sinkhorn(logits, 20, 1e-6)
    assert sinkhorn(logits[:0], 20, 1e-6).shape == (0, 4, 4)
    for t in range(9):
        assert_same(f"matrix {t}", sinkhorn(logits[t], 20, 1e-6), together[t])


# ---- coefficients ---------------------------------------------------------------------------


def slow_coefficients(streams, fn, base, scale):
    """Float64: one token's streams (S, D) -> pre, post, comb."""
    s = len(streams)
    v = [float(value) for stream in streams for value in stream]  # stream 0 first
    root = math.sqrt(sum(x * x for x in v) / len(v) + 1e-20)
    u = [sum(float(w) * x for w, x in zip(row, v, strict=True)) / root for row in fn]
    scales = [scale[0]] * s + [scale[1]] * s + [scale[2]] * s * s
    u = [a * float(c) + float(b) for a, c, b in zip(u, scales, base, strict=True)]
    pre = [1 / (1 + math.exp(-a)) + 1e-6 for a in u[:s]]
    post = [2 / (1 + math.exp(-a)) for a in u[s : 2 * s]]
    comb = [u[2 * s + s * j : 2 * s + s * (j + 1)] for j in range(s)]
    return pre, post, slow_sinkhorn(comb, 20, 1e-6)


def predictor(s, width, seed=1):
    count = 2 * s + s * s
    fn = random(count, s * width, seed=seed) / np.float32(math.sqrt(s * width))
    return fn, random(count, seed=seed + 1), np.float32([0.5, 1.5, 2])


@pytest.mark.parametrize(("s", "width"), [(4, 16), (2, 5), (1, 3)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 9])
def test_coefficients_equal_a_float64_loop(s, width, tokens):
    # streams of very different size: a norm per stream would show
    streams = random(tokens, s, width) * (np.float32(10) ** np.arange(s, dtype=np.float32))[:, None]
    fn, base, scale = predictor(s, width)
    got = hc_coefficients(streams, fn, base, scale, CONFIG, FLOAT32)
    want = [slow_coefficients(x, fn, base, scale) for x in streams]
    shapes = [(tokens, s), (tokens, s), (tokens, s, s)]
    for i, name in enumerate(["pre", "post", "comb"]):
        assert got[i].dtype == np.float32
        assert_close(name, got[i], np.reshape([w[i] for w in want], shapes[i]))


def test_pre_has_an_epsilon_and_post_has_none():
    fn, scale = np.zeros((24, 8), np.float32), np.ones(3, np.float32)
    for u, pre, post in [(0, 0.500001, 1.0), (1, 0.7310596, 1.4621172)]:
        base = np.full(24, u, np.float32)
        got = hc_coefficients(random(1, 4, 2), fn, base, scale, CONFIG, FLOAT32)
        assert_close("pre", got[0], [[pre] * 4], rel=1e-7, floor=1e-7)
        assert_close("post", got[1], [[post] * 4], rel=1e-7, floor=1e-7)
    far = np.full(24, -30, np.float32)
    pre, post, _ = hc_coefficients(random(1, 4, 2), fn, far, scale, CONFIG, FLOAT32)
    assert_close("pre at the far end", pre, [[1e-6] * 4], rel=1e-6, floor=0)
    assert post.max() < 1e-12


def test_zero_streams_give_the_bias_alone():
    fn, base, scale = predictor(4, 8)
    pre, post, _ = hc_coefficients(
        np.zeros((1, 4, 8), np.float32), fn, base, scale, CONFIG, FLOAT32
    )
    assert_close("pre", pre[0], 1 / (1 + np.exp(-base[:4])) + 1e-6)
    assert_close("post", post[0], 2 / (1 + np.exp(-base[4:8])))


def test_coefficients_do_not_depend_on_the_size_of_the_streams():
    fn, base, scale = predictor(4, 16)
    x = random(3, 4, 16)
    small = hc_coefficients(x, fn, base, scale, CONFIG, FLOAT32)
    large = hc_coefficients(1024 * x, fn, base, scale, CONFIG, FLOAT32)
    for a, b in zip(small, large, strict=True):
        assert_close("coefficients", a, b)


def test_coefficients_are_never_rounded_to_bf16():
    fn, base, scale = predictor(4, 16)
    x = random(3, 4, 16)
    plain = hc_coefficients(x, fn, base, scale, CONFIG, FLOAT32)
    official = hc_coefficients(x, fn, base, scale, CONFIG, OFFICIAL)
    for a, b in zip(plain, official, strict=True):
        assert_same("coefficients", b, a)


def test_float64_settings_do_not_leak():
    fn, base, scale = predictor(4, 16)
    values = {name: np.float64(value) for name, value in vars(CONFIG).items()}
    config = SimpleNamespace(**values | {"hc_sinkhorn_iters": 20})
    for part in hc_coefficients(random(3, 4, 16), fn, base, scale, config, FLOAT32):
        assert part.dtype == np.float32


# ---- collapse and update --------------------------------------------------------------------

STREAMS = np.float32([[[1, 10], [2, 20]]])  # one token, two streams of two channels


def test_collapse_weighs_the_streams():
    assert_same("x", hc_collapse(STREAMS, np.float32([[1, 0.5]]), FLOAT32), [[2, 20]])


def test_update_contracts_the_first_axis_of_comb():
    # everything of stream 0 goes to stream 1; the transpose would move stream 1 to stream 0
    comb, post = np.float32([[[0, 1], [0, 0]]]), np.float32([[3, 0.5]])
    y = np.float32([[100, 200]])
    assert_same("new", hc_update(STREAMS, y, post, comb, FLOAT32), [[[300, 600], [51, 110]]])


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 65])
@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=lambda n: n.name)
def test_collapse_and_update_equal_their_sums(tokens, numerics):
    x, y, pre, post = random(tokens, 4, 6), random(tokens, 6), random(tokens, 4), random(tokens, 4)
    comb = random(tokens, 4, 4, seed=1)
    rel = 4e-3 if numerics.bf16 else 1e-6
    collapsed, updated = np.zeros((tokens, 6)), np.zeros((tokens, 4, 6))
    for t, c in np.ndindex(tokens, 6):
        collapsed[t, c] = sum(float(pre[t, i]) * float(x[t, i, c]) for i in range(4))
        for k in range(4):
            updated[t, k, c] = float(post[t, k]) * float(y[t, c])
            updated[t, k, c] += sum(float(comb[t, j, k]) * float(x[t, j, c]) for j in range(4))
    got = hc_collapse(x, pre, numerics), hc_update(x, y, post, comb, numerics)
    assert got[0].dtype == got[1].dtype == np.float32
    assert_close("collapse", got[0], collapsed, rel=rel)
    assert_close("update", got[1], updated, rel=rel)
    if numerics.bf16:
        assert_same("bf16", got[1], round_bf16(got[1]))


def test_update_is_rounded_once():
    # 1 + 2^-9 + 2^-8; rounding after each term would give 1
    streams, y = np.float32([[[1 + 2**-9]]]), np.float32([[2**-8]])
    one = np.ones((1, 1, 1), np.float32)
    assert_same("sum", hc_update(streams, y, one[0], one, OFFICIAL), [[[1 + 2**-7]]])


def test_the_first_sublayer_reads_exactly_the_embedding():
    embedding = random(3, 6)
    streams, pre = initial_streams(embedding, 4)
    assert streams.shape == (3, 4, 6) and pre.dtype == np.float32
    for k in range(4):
        assert_same(f"stream {k}", streams[:, k], embedding)
    assert_same("pre", pre, [[1, 0, 0, 0]] * 3)
    assert_same("collapsed", hc_collapse(streams, pre, FLOAT32), embedding)


# ---- rows and strides -----------------------------------------------------------------------


def test_a_token_alone_has_the_bits_it_has_in_a_batch():
    x, y = random(9, 4, 64), random(9, 64, seed=1)
    fn, base, scale = predictor(4, 64)

    def sublayer(x, y):
        pre, post, comb = hc_coefficients(x, fn, base, scale, CONFIG, INVARIANT)
        return (
            pre,
            post,
            comb,
            hc_collapse(x, pre, INVARIANT),
            hc_update(x, y, post, comb, INVARIANT),
        )

    together = sublayer(x, y)
    for t in range(9):
        for part, alone in enumerate(sublayer(x[t : t + 1], y[t : t + 1])):
            assert_same(f"token {t} part {part}", alone[0], together[part][t])


@pytest.mark.parametrize("numerics", [FLOAT32, INVARIANT, OFFICIAL], ids=["f32", "inv", "bf16"])
def test_strides_of_the_streams_do_not_matter(numerics):
    x, y, (fn, base, scale) = random(9, 4, 64), random(9, 64, seed=1), predictor(4, 64)
    pre, post, comb = hc_coefficients(x, fn, base, scale, CONFIG, FLOAT32)
    for name, function in {
        "coefficients": lambda x: hc_coefficients(x, fn, base, scale, CONFIG, numerics),
        "collapse": lambda x: hc_collapse(x, pre, numerics),
        "update": lambda x: hc_update(x, y, post, comb, numerics),
    }.items():
        assert_any_layout(name, function, x)
    assert_any_layout("comb", lambda comb: hc_update(x, y, post, comb, numerics), comb)
    assert_any_layout("pre", lambda pre: hc_collapse(x, pre, numerics), pre)
    assert_any_layout("sinkhorn", lambda z: sinkhorn(z, 20, 1e-6), random(9, 4, 4))
