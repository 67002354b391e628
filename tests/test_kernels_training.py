"""The kernels that training's small operations use: each against its definition on a GPU.

The definitions are held to finite differences elsewhere, so equality is all that is left to ask.
Run `make test-gpu`.
"""

import numpy as np
import pytest

from dsv41.dispatch import find_kernel
from dsv41.formats import round_bf16
from dsv41.moe import moe_experts, route
from dsv41.ops import rmsnorm, swiglu
from dsv41.quant import (
    ACTIVATION_FP8,
    FLOAT32,
    INDEX_FP4,
    MAIN_KV_FP4,
    OFFICIAL,
    WEIGHT_FP4,
    WEIGHT_FP8,
    fake_quantize,
)
from dsv41.rope import rotate
from dsv41.train.adamw import adamw_steps
from dsv41.train.losses import balance_loss
from dsv41.train.many import scale_add, scale_all, square_sums
from dsv41.train.moe import moe_experts_backward, route_backward
from dsv41.train.muon import nesterov_all
from dsv41.train.ops import rmsnorm_backward, swiglu_backward

pytestmark = pytest.mark.gpu


def moved(xp, x):
    """x with every array in it on the GPU; arrays are copied, also by NumPy."""
    if isinstance(x, dict):
        return {key: moved(xp, value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(moved(xp, value) for value in x)
    if isinstance(x, np.ndarray):
        return x.copy() if xp is np else xp.asarray(x)
    return x


def leaves(x):
    if isinstance(x, dict):
        return [leaf for value in x.values() for leaf in leaves(value)]
    if isinstance(x, list | tuple):
        return [leaf for value in x for leaf in leaves(value)]
    return [x.get() if hasattr(x, "get") else np.asarray(x)]


def compare(xp, op, *arguments, most=1e-5, least=0, in_place=False):
    """Kernel and definition on copies of the same arguments, relative to the largest value.

    least: the largest value counts as no less, for results that are all cancellation.
    """
    assert find_kernel(op.definition.__name__, "cupy") is not None
    there, here = moved(xp, arguments), moved(np, arguments)
    got, want = op(*there), op.definition(*here)
    got, want = (there, here) if in_place else (got, want)
    again = op(*moved(xp, arguments))
    for a, b in zip(leaves(got), leaves(want), strict=True):
        assert a.shape == b.shape
        largest = max(least, np.abs(b).max(initial=0)) or 1
        assert np.abs(a - b).max(initial=0) <= most * largest
    if not in_place:
        assert all(np.array_equal(a, b) for a, b in zip(leaves(got), leaves(again), strict=True))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def normal(rng, *shape):
    return rng.normal(0, 1, shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 31), (65, 32), (1000, 128), (70, 4, 96)])
def test_rmsnorm_and_its_gradient(cupy, rng, shape):
    x, dy, weight = normal(rng, *shape), normal(rng, *shape), normal(rng, shape[-1])
    compare(cupy, rmsnorm, x, weight, 1e-20, FLOAT32)
    compare(cupy, rmsnorm, x, weight, 1e-20, OFFICIAL, most=2**-8)
    least = 1 if shape[-1] == 1 else 0  # a single number cannot be moved: dx is 0 but for rounding
    compare(cupy, rmsnorm_backward, dy, x, weight, 1e-6, most=1e-4, least=least)


@pytest.mark.parametrize(
    "fmt", [ACTIVATION_FP8, INDEX_FP4, MAIN_KV_FP4, WEIGHT_FP8, WEIGHT_FP4], ids=lambda f: f.name
)
def test_rounding_to_blocks_and_to_bf16(cupy, rng, fmt):
    """Every exponent, subnormals and zeros, ties: the bits of the definition."""
    x = normal(rng, 3000, 96) * np.exp2(rng.integers(-140, 100, (3000, 1))).astype(np.float32)
    x[:10] = 0
    x[10:200] = np.repeat(rng.choice([0.25, 0.75, 1.75, 2.5, 3.5, 5, 6], (190, 1)), 96, axis=1)
    x[-3:] = 0
    compare(cupy, fake_quantize, x, fmt, most=0)
    compare(cupy, fake_quantize, x[:0], fmt, most=0)
    compare(cupy, round_bf16, x, most=0)
    with pytest.raises(ValueError, match="last axis must be a multiple of"):
        fmt.fake(cupy.ones((2, 40), np.float32))


@pytest.mark.parametrize("shape", [(0, 2, 64), (1, 64), (65, 8, 64), (7, 33, 2, 16)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotate(cupy, rng, shape, inverse):
    positions = rng.integers(0, 1_000_000, shape[0])
    compare(cupy, rotate, normal(rng, *shape), positions, normal(rng, 8) ** 2, inverse)


@pytest.mark.parametrize("limit", [0, None, 0.7, 10.0])
def test_swiglu_and_its_gradient(cupy, rng, limit):
    dy, gate, up = normal(rng, 3, 77, 64)
    compare(cupy, swiglu, 20 * gate, up, limit)
    compare(cupy, swiglu_backward, dy, gate, up, limit)


def router(rng, tokens, experts, width=32):
    gate = {"weight": normal(rng, experts, width), "bias": 0.1 * normal(rng, experts)}
    gate["bias_vl"] = -gate["bias"]
    return normal(rng, tokens, width), gate, rng.random(tokens) < 0.3


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(0, 8, 2), (1, 4, 1), (300, 16, 2), (65, 384, 6)]
)
@pytest.mark.parametrize("normalize", [False, True])
def test_route_and_its_gradient(cupy, rng, tokens, experts, k, normalize):
    x, gate, is_image = router(rng, tokens, experts)
    rest = 1.5, normalize, FLOAT32
    compare(cupy, route, x, gate, is_image, k, *rest)
    chosen = route.definition(x, gate, is_image, k, *rest)[0]
    dweight, dscores = normal(rng, tokens, k), normal(rng, tokens, experts)
    compare(cupy, route_backward, dweight, dscores, x, gate, chosen, *rest, most=1e-4)


def test_equal_scores_go_to_the_lower_expert(cupy):
    gate = {"weight": np.zeros((5, 4), np.float32), "bias": np.array([0, 1, -0.0, 1, 0], "f4")}
    compare(
        cupy, route, np.ones((3, 4), np.float32), gate, np.zeros(3, bool), 4, 1.5, True, FLOAT32
    )


def test_balance_loss(cupy, rng):
    order = np.sort(rng.integers(0, 5, 300))
    chosen = np.argsort(rng.random((300, 16)), axis=1)[:, :2]
    compare(cupy, balance_loss, rng.random((300, 16)).astype(np.float32), chosen, order, 6)


@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=["float32", "official"])
@pytest.mark.parametrize("tokens, spare", [(1, 1 << 20), (63, 1 << 20), (300, 1 << 20), (300, 0)])
def test_experts_and_their_gradients(cupy, rng, monkeypatch, tokens, spare, numerics):
    """With room for any distribution, and with the busiest expert's number read back."""
    monkeypatch.setattr("dsv41_kernels.moe_experts.grouped.SPARE_BYTES", spare)

    def one():
        return {
            n: {"weight": 0.2 * normal(rng, *s)}
            for n, s in (("w1", (64, 32)), ("w3", (64, 32)), ("w2", (32, 64)))
        }

    p = {"experts": {e: one() for e in range(6)}, "shared_experts": one()}
    chosen = np.argsort(rng.random((tokens, 5)), axis=1)[:, :2]  # the last expert gets nothing
    x, dy, weight = (
        normal(rng, tokens, 32),
        normal(rng, tokens, 32),
        rng.random((tokens, 2)).astype("f4"),
    )
    most = 1e-4 if numerics is FLOAT32 else 2e-2
    compare(cupy, moe_experts, x, p, chosen, weight, 10.0, numerics, most=most)
    compare(cupy, moe_experts_backward, dy, x, p, chosen, weight, 10.0, numerics, most=most)


def arrays(rng):
    return [normal(rng, *shape) for shape in ((1,), (4096,), (4097,), (3, 5), (200, 100))]


def test_lists_of_arrays(cupy, rng):
    weights, m, v, grads = (arrays(rng) for _ in range(4))
    numbers = [0.9, 0.8, 1.0, 0.5, 0.0]
    compare(cupy, square_sums, weights)
    compare(cupy, scale_all, weights, 0.3, in_place=True)
    compare(cupy, scale_add, weights, numbers, grads, numbers[::-1], in_place=True)
    compare(cupy, nesterov_all, m, grads, 0.95)
    compare(cupy, nesterov_all, m, grads, 0.95, in_place=True)
    v = [x * x for x in v]
    steps, rates, decays = [1, 2, 3, 4, 5], [0.01] * 5, [0.1, 0.0, 0.1, 0.0, 0.1]
    lists = weights, m, v, steps, grads, rates, decays
    compare(cupy, adamw_steps, *lists, (0.9, 0.95), 1e-20, in_place=True)
