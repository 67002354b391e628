"""Muon: the iteration against its singular values, update size, heads, batches, wrong variants."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from compare import assert_any_layout, assert_close, assert_same

from dsv41.presets import preset
from dsv41.tensors import expected_tensors
from dsv41.train import muon
from dsv41.train.muon import (
    FLAT,
    GAMMA,
    HYBRID,
    STEEP,
    matrix_rows,
    muon_step,
    muon_update,
    nesterov,
    newton_schulz,
)

G = np.array([[1.0, 2], [3, 4], [5, 6]])
FIVE = [[-0.46751857, 0.57347331], [0.07243229, 0.40945262], [0.61238314, 0.24543194]]
TEN = [[-0.55100168, 0.72782848], [0.13616387, 0.56107251], [0.82332942, 0.39431653]]


def random(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def singular(x):
    return np.linalg.svd(x.astype(np.float64))[1]


def with_spectrum(values, n, m, dtype=np.float64):
    """A random (n, m) matrix with these min(n, m) singular values."""
    u, v = (np.linalg.qr(random(side, len(values), seed=side))[0] for side in (n, m))
    return ((u * values) @ v.T).astype(dtype)


def mutated(module, text, replacement):
    """A copy of `module` with one piece of its source replaced."""
    source = Path(module.__file__).read_text()
    assert source.count(text) == 1, f"{text!r} occurs {source.count(text)} times"
    copy = ModuleType(module.__name__)
    copy.__package__ = module.__package__
    exec(source.replace(text, replacement), copy.__dict__)
    return copy


# ---- the iteration --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_values_of_five_and_of_ten_steps(dtype):
    rel = 1e-8 if dtype == np.float64 else 1e-6
    for steps, want in [((STEEP,) * 5, FIVE), (HYBRID, TEN)]:
        got = newton_schulz(G.astype(dtype), steps)
        assert got.dtype == dtype
        assert_close("tall", got, want, rel=rel, floor=1e-8)
        assert_close("wide", newton_schulz(G.T.astype(dtype), steps).T, want, rel=rel, floor=1e-8)


def test_singular_values_of_the_example():
    assert_close("five", singular(newton_schulz(G, (STEEP,) * 5)), [0.8175728, 0.6979741], rel=1e-7)
    assert_close("ten", singular(newton_schulz(G)), [1.0000172, 1.0000013], rel=1e-7)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 7), (7, 1), (5, 5), (63, 65), (65, 63), (64, 2)])
def test_every_singular_value_goes_through_the_polynomials(n, m):
    g = random(n, m)
    u, s, vt = np.linalg.svd(g, full_matrices=False)
    s = s / (np.sqrt(np.sum(s * s)) + 1e-7)
    for a, b, c in HYBRID:
        s = a * s + b * s**3 + c * s**5
    assert_close("y", newton_schulz(g), (u * s) @ vt, rel=1e-9)


def test_the_flat_steps_have_their_fixed_point_at_one_and_no_slope_there():
    a, b, c = FLAT
    assert a + b + c == 1 and a + 3 * b + 5 * c == 0
    assert STEEP[0] ** 8 > 1e4


@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (64, 64), (65, 63), (2, 2)])
@pytest.mark.parametrize("condition", [1, 10, 100, 1e3, 1e4])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_singular_values_end_near_one(shape, condition, dtype):
    g = with_spectrum(np.geomspace(1, 1 / condition, min(shape)), *shape, dtype)
    s = singular(newton_schulz(g))
    assert 0.9995 < s.min() and s.max() < 1.0021
    if condition <= 1e3:  # then all of them are above 1e-4 of the Frobenius norm
        assert 0.99999 < s.min() and s.max() < 1.0006


def test_what_counts_is_the_share_of_the_frobenius_norm():
    # one small value below 63 equal ones: condition 1e4, but 1.3e-5 of the norm
    g = with_spectrum(np.append(np.ones(63), 1e-4), 64, 64)
    assert 0.75 < singular(newton_schulz(g)).min() < 0.85
    five = singular(newton_schulz(random(64, 128), (STEEP,) * 5))
    assert five.min() < 0.75 and five.max() > 1.1


def test_the_size_of_the_gradient_does_not_matter():
    assert_close("times 1000", newton_schulz(1000 * G), TEN, rel=1e-8, floor=0)
    # one power of two: only the 1e-7 under the fraction can tell them apart
    g = random(8, 16, dtype=np.float32)
    assert_close("2^20", newton_schulz(g * np.float32(2**20)), newton_schulz(g), rel=1e-6)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (4, 4), (5, 3, 2), (0, 3, 2)])
def test_zeros_stay_zeros(shape):
    assert_same("y", newton_schulz(np.zeros(shape, np.float32)), np.zeros(shape, np.float32))


def test_matrices_of_a_stack_are_independent_and_a_zero_one_harms_nobody():
    stack = random(4, 3, 6, 10, dtype=np.float32)
    stack[1, 2] = 0
    together = newton_schulz(stack)
    for i in np.ndindex(4, 3):
        assert_close(f"matrix {i}", newton_schulz(stack[i]), together[i], rel=1e-6)
    assert not together[1, 2].any()


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (2, 9, 5)])
def test_strides_of_the_gradient_do_not_matter(shape):
    assert_any_layout("y", newton_schulz, random(*shape, dtype=np.float32))


# ---- the update -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 512), (512, 128), (256, 256), (1, 64), (64, 1)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_update_has_rms_0_18(shape, dtype):
    update = muon_update(random(*shape, dtype=dtype))
    assert update.dtype == dtype
    assert abs(np.sqrt(np.mean(update * update)) - 0.18) < 2e-4


def test_nesterov_by_hand():
    momentum = np.zeros(2)
    assert_close("first", nesterov(momentum, np.array([1.0, -2])), [1.95, -3.9])
    assert_close("momentum", momentum, [1, -2])
    # M = 0.95 * 1 + 3 = 3.95; direction 0.95 * 3.95 + 3
    assert_close("second", nesterov(momentum, np.array([3.0, 0])), [6.7525, -1.805])
    assert_close("momentum", momentum, [3.95, -1.9])


def test_a_step_decays_the_weight_and_follows_the_singular_vectors():
    weight, g = random(6, 10, seed=1), with_spectrum(np.linspace(1, 0.1, 6), 6, 10)
    u, _, vt = np.linalg.svd(g, full_matrices=False)
    want = weight * (1 - 0.02 * 0.1) - 0.02 * 0.18 * np.sqrt(10) * (u @ vt)
    muon_step([(weight, g, 0.02)], decay=0.1)
    assert_close("weight", weight, want, rel=1e-5)


def test_an_expert_without_tokens_moves_along_its_momentum():
    weight, momentum = np.zeros((6, 10)), np.zeros((6, 10))
    first = nesterov(momentum, random(6, 10))
    second = nesterov(momentum, np.zeros((6, 10)))
    assert_close("direction", second, first * 0.95**2 / 1.95)
    muon_step([(weight, second, 1.0)], decay=0.1)
    assert_close("weight", weight, -muon_update(first), rel=1e-5)


def test_matrices_of_one_shape_share_a_product_and_keep_their_own_rates(monkeypatch):
    shapes = [(6, 10), (10, 6), (6, 10), (4, 4), (6, 10), (6, 10)]
    weights = [random(*s, seed=i, dtype=np.float32) for i, s in enumerate(shapes)]
    directions = [random(*s, seed=9 + i, dtype=np.float32) for i, s in enumerate(shapes)]
    rates = [0.01 * (i + 1) for i in range(6)]
    want = [w.copy() for w in weights]
    for job in zip(want, directions, rates, strict=True):
        muon_step([job], 0.1)
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 150)  # two of the (6, 10) at a time
    muon_step(list(zip(weights, directions, rates, strict=True)), 0.1)
    for i, (got, alone) in enumerate(zip(weights, want, strict=True)):
        assert_close(f"weight {i}", got, alone, rel=1e-6)


# ---- heads ----------------------------------------------------------------------------------

TINY = preset("tiny")


def test_which_tensors_are_several_matrices():
    shapes = {name: spec.logical_shape for name, spec in expected_tensors(TINY).items()}
    rows = {name: matrix_rows(name, s, TINY) for name, s in shapes.items() if len(s) == 2}
    for name, counts in rows.items():
        assert sum(counts) == shapes[name][0], name
    assert rows["layers.0.attn.wq_b.weight"] == rows["mtp.0.attn.wq_b.weight"] == (64,) * 4
    assert rows["layers.2.attn.indexer.wq_b.weight"] == (32,) * 4
    assert rows["layers.0.attn.wo_a.weight"] == (32,) * 2
    assert rows["layers.1.engram.wkv.weight"] == (64,) * 5
    assert rows["layers.0.hc_attn_fn"] == rows["mtp.2.hc_ffn_fn"] == (4, 4, 16)
    assert rows["vision.blocks.0.attn.wqkv.weight"] == (16, 16, 16, 16, 32)
    assert rows["vision.blocks.1.mlp.w1.weight"] == (48, 48)
    whole = "attn.wkv attn.wq_a attn.wo_b attn.indexer.wk attn.indexer.weights_proj "
    for part in (whole + "attn.compressor.wkv ffn.gate ffn.experts.3.w1").split():
        assert len(rows[f"layers.2.{part}.weight"]) == 1, part


def test_the_released_heads_are_64_matrices_of_512_by_1280():
    config = preset("v4.1-flash")
    name = "layers.7.attn.wq_b.weight"
    assert matrix_rows(name, expected_tensors(config)[name].shape, config) == (512,) * 64


def test_a_head_is_orthogonal_alone_and_not_in_the_whole():
    g = random(4, 8, 24)
    g[2] *= 1e3  # one head with a huge gradient
    alone = [muon_update(head) for head in g]
    assert_close("heads", muon_update(g), alone)
    for head in alone:
        assert_close("rms", np.sqrt(np.mean(head**2)), 0.18, rel=1e-3)
    whole = muon_update(g.reshape(32, 24)).reshape(4, 8, 24)
    sizes = np.sqrt(np.mean(whole**2, axis=(1, 2)))
    assert sizes.max() > 1.2 * sizes.min()  # the huge head fills its 8 of the 24 directions alone


# ---- wrong variants -------------------------------------------------------------------------

WRONG = {
    "no flat steps": ("(STEEP,) * 8 + (FLAT,) * 2", "(STEEP,) * 10"),
    "five steps": ("(STEEP,) * 8 + (FLAT,) * 2", "(STEEP,) * 3 + (FLAT,) * 2"),
    "spectral instead of Frobenius": ("np.sum(y * y, axis=(-2, -1)", "np.max(y * y, axis=(-2, -1)"),
    "one norm for the stack": ("axis=(-2, -1), keepdims=True", "keepdims=True"),
    "no epsilon": (" + 1e-7)", ")"),
    "cubic only": ("(b * gram + c * (gram @ gram))", "(b * gram)"),
    "tall not turned back": (
        "return y.swapaxes(-1, -2) if is_tall",
        "return y.reshape(g.shape) if is_tall",
    ),
    "scale by the shorter side": ("max(direction.shape[-2:])", "min(direction.shape[-2:])"),
    "no Nesterov": ("return mu * momentum + g", "return momentum.copy()"),
    "damped gradient": ("momentum += g", "momentum += (1 - mu) * g"),
    "no decay": ("[1 - lr * decay for", "[1.0 for"),
    "decay without the rate": ("[1 - lr * decay for", "[1 - decay for"),
    "update not scaled by the rate": ("[-lr for", "[-1.0 for"),
    "ascent": ("[-lr for", "[lr for"),
}


def check(module):
    """A short version of the tests above."""
    for x, want in [(G, TEN), (G.T, np.transpose(TEN))]:
        with np.errstate(all="ignore"):
            assert_close("y", module.newton_schulz(x), want, rel=1e-8, floor=0)
            assert_same("zero", module.newton_schulz(0 * x), 0 * x)
    pair = np.stack([G, 1e3 * G])
    assert_close("stack", module.newton_schulz(pair), [TEN, TEN], rel=1e-8, floor=0)
    s = singular(module.newton_schulz(with_spectrum(np.geomspace(1, 1e-3, 20), 20, 40)))
    assert 0.9999 < s.min() and s.max() < 1.001
    assert_close("rms", np.sqrt(np.mean(module.muon_update(random(8, 32)) ** 2)), 0.18, rel=1e-3)
    momentum = np.ones(1)
    assert_close("direction", module.nesterov(momentum, np.array([3.0])), [6.7525])
    weight = np.array([[2.0, 0.0]])
    module.muon_step([(weight, np.array([[3.0, 0.0]]), 0.01)], decay=0.1)
    assert_close("weight", weight, [[2 * 0.999 - 0.01 * GAMMA * np.sqrt(2), 0]], rel=1e-6)


def test_the_right_module_passes_the_check():
    check(muon)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variant_is_noticed(name):
    wrong = mutated(muon, *WRONG[name])
    with pytest.raises(AssertionError):
        check(wrong)
