"""Hyper-connection kernels: equal to their definitions, the same bits again, alone as in a batch.

PYTHONPATH=.:kernels python3 -m pytest -q -m gpu tests/test_kernels_hc.py
"""

from types import SimpleNamespace

import numpy as np
import pytest
from compare import assert_close, assert_same
from fake_cuda import fake_cuda, on_device, wrapper  # noqa: F401

import dsv41.train.mhc  # noqa: F401, its definitions enter OPS
from dsv41.dispatch import OPS, find_kernel
from dsv41.quant import FLOAT32, OFFICIAL

CONFIG = SimpleNamespace(rms_norm_eps=1e-20, hc_eps=1e-6, hc_sinkhorn_iters=20)
TOKENS = [0, 1, 2, 15, 63, 64, 65, 257]
SHAPES = [(4, 128), (4, 300), (3, 33), (2, 1), (1, 64)]


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def arguments(op, tokens, s, width, numerics=FLOAT32):
    """Random inputs of the op, in the order of its signature."""
    mix = s * (s + 2)
    x, y, pre, post = (random(tokens, *n, seed=sum(n)) for n in [(s, width), (width,), (s,), (s,)])
    comb, dnew = random(tokens, s, s, seed=4), random(tokens, s, width, seed=5)
    fn = random(mix, s * width, seed=6) / np.float32(np.sqrt(s * width))
    mixing = x, fn, random(mix, seed=7), np.float32([0.5, 1.5, 2]), CONFIG, numerics
    return {
        "hc_coefficients": mixing,
        "hc_collapse": (x, pre, numerics),
        "hc_update": (x, y, post, comb, numerics),
        "hc_collapse_backward": (y, x, pre),
        "hc_update_backward": (dnew, x, y, post, comb),
        "hc_coefficients_backward": (pre, post, comb, *mixing),
    }[op]


NAMES = [
    *("hc_coefficients", "hc_collapse", "hc_update"),
    *("hc_coefficients_backward", "hc_collapse_backward", "hc_update_backward"),
]


def on_gpu(cupy, op, given):
    """-> the kernel's results as a tuple of NumPy arrays."""
    moved = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in given]
    return _tuple(find_kernel(op, "cupy")(*moved))


def _tuple(results):
    return tuple(r if isinstance(r, np.ndarray) else r.get() for r in _as_tuple(results))


def _as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=lambda n: n.name)
@pytest.mark.parametrize(("s", "width"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("op", NAMES)
def test_equals_the_definition(cupy, op, tokens, s, width, numerics):
    given = arguments(op, tokens, s, width, numerics)
    want, got = _as_tuple(OPS[op](*given)), on_gpu(cupy, op, given)
    assert len(want) == len(got)
    rounds = numerics.bf16 and op in ("hc_collapse", "hc_update")
    for part, (g, w) in enumerate(zip(got, want, strict=True)):
        # one bf16 step where two float32 sums fall on both sides of a tie
        assert_close(f"{op} {part}", g, w, rel=4e-4 if rounds else 2e-6, floor=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 70])
def test_coefficients_of_the_released_width_are_within_1e_6_of_float64(cupy, tokens):
    given = arguments("hc_coefficients", tokens, 4, 5120)
    wide = [a.astype(np.float64) if isinstance(a, np.ndarray) else a for a in given]
    want = OPS["hc_coefficients"](*wide)
    for g, w in zip(on_gpu(cupy, "hc_coefficients", given), want, strict=True):
        assert np.abs(g - w).max() < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize(("s", "width"), [(4, 2), (4, 300), (2, 514), (4, 5120)])
def test_both_versions_of_the_sums_agree(cupy, s, width):
    from dsv41_kernels.hc_coefficients.cupy_op import mixing_sums

    for tokens in (1, 25, 700):
        x, fn = arguments("hc_coefficients", tokens, s, width)[:2]
        want = np.concatenate([x.reshape(tokens, -1) @ fn.T, np.square(x).sum((1, 2))[:, None]], 1)
        moved = cupy.asarray(x), cupy.asarray(fn)
        for version in ("v1", "v2"):
            got = mixing_sums(*moved, version).sum(axis=1).get()[:, : len(fn) + 1]
            assert_close(f"{version}, {tokens} tokens", got, want, rel=1e-5, floor=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("op", NAMES)
def test_repeats_have_the_same_bits(cupy, op):
    given = arguments(op, 300, 4, 128)
    first = on_gpu(cupy, op, given)
    for _ in range(20):
        for part, again in enumerate(on_gpu(cupy, op, given)):
            assert_same(f"{op} {part}", again, first[part])


@pytest.mark.gpu
@pytest.mark.parametrize("op", NAMES)
def test_a_token_alone_has_the_bits_it_has_in_a_batch(cupy, op):
    given = arguments(op, 70, 4, 320)
    together = on_gpu(cupy, op, given)
    for t in (0, 33, 69):
        alone = [a[t : t + 1] if isinstance(a, np.ndarray) and len(a) == 70 else a for a in given]
        for part, result in enumerate(on_gpu(cupy, op, alone)):
            if len(together[part]) == 70:  # not the sums over all tokens
                assert_same(f"{op} {part} of token {t}", result[0], together[part][t])


@pytest.mark.gpu
@pytest.mark.parametrize("op", NAMES)
def test_other_strides_do_not_matter(cupy, op):
    given = arguments(op, 9, 4, 64)
    want = on_gpu(cupy, op, given)
    moved = []
    for a in given:
        if isinstance(a, np.ndarray):
            apart = cupy.asarray(np.full((*a.shape[:-1], 2 * a.shape[-1]), np.nan, a.dtype))
            apart[..., ::2] = cupy.asarray(a)
            a = apart[..., ::2]
        moved.append(a)
    for part, result in enumerate(_tuple(find_kernel(op, "cupy")(*moved))):
        assert_same(f"{op} {part}", result, want[part])


# ---- without a GPU --------------------------------------------------------------------------


def device_arguments(op, tokens=3, s=4, width=8):
    return [
        on_device(a) if isinstance(a, np.ndarray) else a for a in arguments(op, tokens, s, width)
    ]


@pytest.mark.parametrize("op", NAMES)
def test_wrapper_returns_the_shapes_of_the_definition(fake_cuda, op):  # noqa: F811
    for tokens in (0, 3):
        want = _as_tuple(OPS[op](*arguments(op, tokens, 4, 8)))
        fake_cuda.clear()
        got = _as_tuple(wrapper(op)(*device_arguments(op, tokens)))
        assert [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in want]
        assert all(min(grid) > 0 and block[0] % 32 == 0 for _, _, grid, block, _ in fake_cuda)
        # without tokens only the weight gradients are written: with zeros
        assert bool(fake_cuda) == (tokens > 0 or op == "hc_coefficients_backward")


@pytest.mark.parametrize("op", NAMES)
def test_wrapper_names_the_argument_that_is_wrong(fake_cuda, op):  # noqa: F811
    names = OPS[op].__code__.co_varnames
    for at, a in enumerate(device_arguments(op)):
        if not isinstance(a, np.ndarray):
            continue
        for wrong, kind in [
            (np.asarray(a), TypeError),
            (a.astype(np.float64), TypeError),
            (a[0] if names[at] == "streams" else a[..., :-1], ValueError),
        ]:
            given = device_arguments(op)
            given[at] = wrong
            with pytest.raises(kind, match=f"^{names[at]}: expected"):
                wrapper(op)(*given)
    assert not fake_cuda


def test_more_streams_than_a_warp_has_sums_are_refused(fake_cuda):  # noqa: F811
    with pytest.raises(ValueError, match=r"streams: expected shape \(T, 1 to 4, D\)"):
        wrapper("hc_collapse")(*device_arguments("hc_collapse", s=5))
