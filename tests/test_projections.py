"""The two low-rank waists of attention: who is grouped with whom, what is quantised on the way."""

from types import SimpleNamespace

import numpy as np
import pytest
from compare import assert_any_layout, assert_close, assert_same

from dsv41.formats import round_bf16
from dsv41.projections import grouped_output, low_rank_queries
from dsv41.quant import ACTIVATION_FP8, FLOAT32, OFFICIAL, quantize_weight

D, Q, H, C, G, O = 64, 32, 4, 16, 2, 32  # hidden, query rank, heads, channels, groups, output rank
CONFIG = SimpleNamespace(
    rms_norm_eps=1e-20, num_attention_heads=H, head_dim=C, o_groups=G, o_lora_rank=O
)
INVARIANT = FLOAT32.but(batch_invariant=True)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def params():
    """Attention parameters, stored as in a checkpoint; small integers keep the sums exact."""

    def stored(*shape, seed):
        w = np.random.default_rng(seed).integers(-7, 8, size=shape).astype(np.float32)
        return {"weight": quantize_weight(w, "tiles")}

    return {
        "wq_a": stored(Q, D, seed=1),
        "q_norm": {"weight": round_bf16(1 + random(Q, seed=2) / np.float32(8))},
        "wq_b": stored(H * C, Q, seed=3),
        "wo_a": stored(G * O, H * C // G, seed=4),
        "wo_b": stored(D, G * O, seed=5),
    }


def matrix(p, name):
    return p[name]["weight"].dense().astype(np.float64)


def stored(x):
    return round_bf16(np.asarray(x, np.float32)).astype(np.float64)


def fp8(x):
    return ACTIVATION_FP8.fake(np.asarray(x, np.float32)).astype(np.float64)


# ---- queries --------------------------------------------------------------------------------


def slow_queries(x, p, store=lambda v: v, quantise=lambda v: v):
    """-> c_q (T, Q), q (T, H, C) in float64, with the roundings given."""
    c_q = store(quantise(x) @ matrix(p, "wq_a").T)
    root = np.sqrt(np.mean(c_q * c_q, axis=1, keepdims=True) + 1e-20)
    c_q = store(c_q / root * p["q_norm"]["weight"])
    q, wq_b = np.zeros((len(x), H, C)), matrix(p, "wq_b")
    for h in range(H):  # rows of one head lie together
        q[:, h] = store(quantise(c_q) @ wq_b[h * C : (h + 1) * C].T)
    return c_q, q


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 65])
def test_queries_go_through_one_normed_latent_head_by_head(tokens):
    x, p = random(tokens, D), params()
    c_q, q = low_rank_queries(x, p, CONFIG, FLOAT32)
    assert c_q.shape == (tokens, Q) and q.shape == (tokens, H, C)
    assert c_q.dtype == q.dtype == np.float32
    want = slow_queries(x, p)
    assert_close("c_q", c_q, want[0])
    assert_close("q", q, want[1])


def test_official_queries_quantise_both_inputs_and_store_three_results():
    x, p = round_bf16(random(65, D)), params()
    c_q, q = low_rank_queries(x, p, CONFIG, OFFICIAL)
    want = slow_queries(x, p, stored, fp8)
    assert_same("c_q", c_q, want[0].astype(np.float32))
    assert_same("q", q, want[1].astype(np.float32))


def test_queries_have_no_norm_per_head():
    x, p = random(3, D), params()
    heads = np.float32([1, 10, 100, 1000]).repeat(C)[:, None]
    plain = low_rank_queries(x, p | {"wq_b": {"weight": random(H * C, Q)}}, CONFIG, FLOAT32)[1]
    large = p | {"wq_b": {"weight": random(H * C, Q) * heads}}
    q = low_rank_queries(x, large, CONFIG, FLOAT32)[1]
    for h in range(H):
        assert_close(f"head {h}", q[:, h], plain[:, h].astype(np.float64) * 10.0**h)


# ---- output ---------------------------------------------------------------------------------


def slow_output(o, p, store=lambda v: v, quantise=lambda v: v):
    """Float64, group by group: heads g * H/G ... of one group share the rows of Wa_g."""
    wo_a, z = matrix(p, "wo_a"), np.zeros((len(o), G * O))
    for g in range(G):
        heads = np.concatenate([o[:, h] for h in range(g * H // G, (g + 1) * H // G)], axis=1)
        z[:, g * O : (g + 1) * O] = store(heads @ wo_a[g * O : (g + 1) * O].T)
    return store(quantise(z) @ matrix(p, "wo_b").T)


def test_neighbouring_heads_share_a_group():
    # one channel, one result per group: z = (h0 + 10 h1, h2 + 10 h3), y = (z0, z1)
    config = SimpleNamespace(o_groups=2, o_lora_rank=1)
    p = {"wo_a": {"weight": np.float32([[1, 10], [1, 10]])}, "wo_b": {"weight": np.eye(2)}}
    o = np.float32([[[1], [2], [3], [4]]])
    assert_close("y", grouped_output(o, p, config, FLOAT32), [[21, 43]])


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 65])
def test_output_equals_a_loop_over_groups(tokens):
    o, p = random(tokens, H, C), params()
    y = grouped_output(o, p, CONFIG, FLOAT32)
    assert y.shape == (tokens, D) and y.dtype == np.float32
    assert_close("y", y, slow_output(o, p))


def test_official_output_quantises_the_second_projection_only():
    o, p = np.round(random(65, H, C) * 32) / np.float32(32), params()
    y = grouped_output(o, p, CONFIG, OFFICIAL)
    assert_same("y", y, slow_output(o, p, stored, fp8).astype(np.float32))
    both = slow_output(fp8(o.reshape(65, -1)).reshape(o.shape), p, stored, fp8)
    assert np.mean(y != both.astype(np.float32)) > 0.5


# ---- rows and strides -----------------------------------------------------------------------


@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=lambda n: n.name)
def test_a_token_alone_has_the_bits_it_has_in_a_batch(numerics):
    numerics = numerics.but(batch_invariant=True)
    x, o, p = random(9, D), random(9, H, C, seed=7), params()
    c_q, q = low_rank_queries(x, p, CONFIG, numerics)
    y = grouped_output(o, p, CONFIG, numerics)
    for t in range(9):
        one = slice(t, t + 1)
        alone = low_rank_queries(x[one], p, CONFIG, numerics)
        assert_same(f"c_q {t}", alone[0], c_q[one])
        assert_same(f"q {t}", alone[1], q[one])
        assert_same(f"y {t}", grouped_output(o[one], p, CONFIG, numerics), y[one])


@pytest.mark.parametrize("numerics", [FLOAT32, INVARIANT, OFFICIAL], ids=["f32", "inv", "bf16"])
def test_strides_do_not_matter(numerics):
    p = params()
    assert_any_layout("queries", lambda x: low_rank_queries(x, p, CONFIG, numerics), random(9, D))
    assert_any_layout("output", lambda o: grouped_output(o, p, CONFIG, numerics), random(9, H, C))
