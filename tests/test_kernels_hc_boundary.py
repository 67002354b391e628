"""The boundary between two sublayers: all versions of its kernel against the definition.

PYTHONPATH=.:kernels python3 -m pytest -q -m gpu tests/test_kernels_hc_boundary.py
"""

from types import SimpleNamespace

import numpy as np
import pytest
from compare import assert_same
from fake_cuda import fake_cuda, on_device, wrapper  # noqa: F401

from dsv41.dispatch import find_kernel
from dsv41.formats import decode_bf16, encode_bf16, round_bf16
from dsv41.mhc import hc_boundary, hc_coefficients, hc_collapse, hc_update, sinkhorn
from dsv41.ops import rmsnorm
from dsv41.quant import ACTIVATION_FP8, FLOAT32, OFFICIAL

CONFIG = SimpleNamespace(rms_norm_eps=1e-20, hc_eps=1e-6, hc_sinkhorn_iters=20)
NAMES = ("streams", "y", "pre", "post", "comb", "fn", "base", "scale", "norm")
WIDE = 65  # more tokens than a small launch of the released width takes


def inputs(tokens, s=4, width=64, bf16=True, seed=0):
    """Arguments in the order of NAMES; with bf16, streams and y are bf16 values."""
    rng = np.random.default_rng(seed)

    def random(*shape):
        return rng.normal(size=shape).astype(np.float32)

    mix, store = s * (s + 2), round_bf16 if bf16 else np.float32
    streams, y = store(random(tokens, s, width)), store(random(tokens, width))
    pre, post = rng.uniform(0, 1, (2, tokens, s)).astype(np.float32)
    comb = sinkhorn(random(tokens, s, s), 20, 1e-6)
    fn = random(mix, s * width) / np.float32(np.sqrt(s * width))
    scale, norm = np.float32([0.5, 1.5, 2]), 1 + random(width) / 8
    return [streams, y, pre, 2 * post, comb, fn, random(mix), scale, norm]


# ---- the definition -------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=lambda n: n.name)
def test_it_is_what_two_sublayers_do_one_after_the_other(numerics):
    """The end of one, the beginning of the next, step by step."""
    streams, y, pre, post, comb, fn, base, scale, norm = given = inputs(5)
    streams = hc_update(streams, y, post, comb, numerics)
    new = hc_coefficients(streams, fn, base, scale, CONFIG, numerics)
    x = rmsnorm(hc_collapse(streams, pre, numerics), norm, CONFIG.rms_norm_eps, numerics)
    got = hc_boundary(*given, CONFIG, numerics)
    for name, g, w in zip(
        ("streams", "x", "pre", "post", "comb"), got, (streams, x, *new), strict=True
    ):
        assert_same(name, g, w)
    records = hc_boundary(*given, CONFIG, numerics, fp8=True)[1]
    assert_same("records", records, ACTIVATION_FP8.encode(x))


def test_a_float64_oracle_token_by_token():
    given = inputs(3, s=2, width=8)
    streams, y, pre, post, comb, _, _, _, norm = (a.astype(np.float64) for a in given)
    got = hc_boundary(*given, CONFIG, FLOAT32)
    for t in range(3):
        new = [
            post[t, k] * y[t] + sum(comb[t, j, k] * streams[t, j] for j in (0, 1)) for k in (0, 1)
        ]
        x = sum(pre[t, k] * new[k] for k in (0, 1))
        assert np.abs(got[0][t] - new).max() < 1e-6
        assert np.abs(got[1][t] - x / np.sqrt(np.mean(x * x)) * norm).max() < 1e-5


# ---- on a GPU -------------------------------------------------------------------------------


def on_gpu(cupy, given, numerics, stored="float32", **settings):
    """-> the kernel's results as NumPy arrays, bf16 bits as float32."""
    given = list(given)
    if stored == "bf16":
        given[:2] = [encode_bf16(a) for a in given[:2]]
    run = find_kernel("hc_boundary", "cupy")
    results = run(*(cupy.asarray(a) for a in given), CONFIG, numerics, **settings)
    return [decode_bf16(r.get()) if r.dtype == np.uint16 else r.get() for r in results]


def check(got, given, numerics):
    """Streams and x in one rounding step of the definition, coefficients 1e-6 of float64."""
    want = hc_boundary(*given, CONFIG, numerics)
    step = 2.0**-7 if numerics.bf16 else 2.0**-20
    for name, g, w in zip(("streams", "x"), got[:2], want[:2], strict=True):
        assert (np.abs(g - w) <= step * np.abs(w) + 1e-5).all(), name
        if numerics.bf16:
            assert np.sum(g != w) <= 1 + 1e-3 * g.size, f"{name}: rounded differently too often"
    wide = [a.astype(np.float64) for a in (got[0], *given[5:8])]
    exact = hc_coefficients.definition(*wide, CONFIG, FLOAT32)
    for name, g, w in zip(("pre", "post", "comb"), got[2:], exact, strict=True):
        assert np.abs(g - w).max(initial=0) < 1e-6, name


KINDS = [(FLOAT32, "float32"), (OFFICIAL, "float32"), (OFFICIAL, "bf16")]


@pytest.mark.gpu
@pytest.mark.parametrize(("numerics", "stored"), KINDS, ids=["f32", "official", "bf16"])
@pytest.mark.parametrize(("s", "width"), [(4, 64), (4, 320), (3, 33), (1, 96)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 65, 137])
@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
def test_plain_versions(cupy, version, tokens, s, width, numerics, stored):
    given = inputs(tokens, s, width, numerics.bf16)
    check(on_gpu(cupy, given, numerics, stored, version=version), given, numerics)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["float32", "bf16"])
@pytest.mark.parametrize("width", [64, 128, 192, 320, 640, 4096, 5120])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 64, WIDE, 137, 1100])
def test_one_pass_on_tensor_cores(cupy, tokens, width, stored):
    given = inputs(tokens, 4, width)
    check(on_gpu(cupy, given, OFFICIAL, stored, version="v4"), given, OFFICIAL)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["float32", "bf16"])
@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_records_are_those_of_x(cupy, tokens, version, stored):
    given = inputs(tokens, 4, 640)
    x = on_gpu(cupy, given, OFFICIAL, stored, version=version)[1]
    records = on_gpu(cupy, given, OFFICIAL, stored, version=version, fp8=True)[1]
    assert_same("records", records, ACTIVATION_FP8.encode(x))


@pytest.mark.gpu
def test_records_of_zeros_have_the_smallest_scale(cupy):
    given = inputs(2, 4, 320)
    given[0], given[1] = np.zeros_like(given[0]), np.zeros_like(given[1])
    records = on_gpu(cupy, given, OFFICIAL, fp8=True, version="v4")[1]
    assert_same("records", records, ACTIVATION_FP8.encode(np.zeros((2, 320), np.float32)))


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4", None])
def test_a_token_alone_has_the_bits_it_has_in_a_batch(cupy, version):
    """v4 runs another kernel for one token than for thousands; the cut of the sums is the same."""
    given = inputs(1000, 4, 5120)
    together = on_gpu(cupy, given, OFFICIAL, "bf16", version=version)
    for t in (0, 1, 64, 511, 999):
        alone = [a[t : t + 1] if len(a) == 1000 else a for a in given]
        for part, g in enumerate(on_gpu(cupy, alone, OFFICIAL, "bf16", version=version)):
            assert_same(f"{version} part {part} of token {t}", g[0], together[part][t])


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
@pytest.mark.parametrize("tokens", [8, 1025])
def test_a_hundred_repeats_have_the_same_bits(cupy, version, tokens):
    given = inputs(tokens, 4, 640)
    first = on_gpu(cupy, given, OFFICIAL, "bf16", version=version)
    for _ in range(100):
        for part, again in enumerate(on_gpu(cupy, given, OFFICIAL, "bf16", version=version)):
            assert_same(f"{version} part {part}", again, first[part])


@pytest.mark.gpu
def test_both_ways_of_storing_give_the_same_bits(cupy):
    for tokens in (3, 200):
        given = inputs(tokens, 4, 640)
        wide, narrow = (on_gpu(cupy, given, OFFICIAL, kind) for kind in ("float32", "bf16"))
        for part, (a, b) in enumerate(zip(wide, narrow, strict=True)):
            assert_same(f"part {part} of {tokens} tokens", a, b)


@pytest.mark.gpu
def test_an_array_that_begins_at_an_odd_address(cupy):
    given = inputs(5, 4, 320)
    want = on_gpu(cupy, given, OFFICIAL)
    moved = [cupy.asarray(a) for a in given]
    buffer = cupy.zeros(given[0].size + 1, cupy.float32)
    buffer[1:] = moved[0].ravel()
    moved[0] = buffer[1:].reshape(given[0].shape)
    got = find_kernel("hc_boundary", "cupy")(*moved, CONFIG, OFFICIAL)
    for part, g in enumerate(got):
        assert_same(f"part {part}", g.get(), want[part])


# ---- without a GPU --------------------------------------------------------------------------


def on_fake(given):
    return [on_device(a) for a in given]


@pytest.mark.parametrize("stored", ["float32", "bf16"])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
def test_wrapper_returns_the_shapes_of_the_definition(fake_cuda, version, fp8, stored):  # noqa: F811
    for tokens in (0, 1, 200):
        given = inputs(tokens)
        want = hc_boundary(*given, CONFIG, OFFICIAL, fp8)
        if stored == "bf16":
            given[:2] = [encode_bf16(a) for a in given[:2]]
        fake_cuda.clear()
        got = wrapper("hc_boundary")(*on_fake(given), CONFIG, OFFICIAL, fp8, version=version)
        assert [g.shape for g in got] == [w.shape for w in want]
        numbers = np.uint16 if stored == "bf16" else np.float32
        assert [g.dtype for g in got[:2]] == [numbers, np.uint8 if fp8 else numbers]
        count = {"v1": 5, "v2": 2, "v3": 1, "v4": 1}[version]
        assert len(fake_cuda) == (count if tokens else 0)


def test_a_launch_never_has_more_blocks_than_run_at_once(fake_cuda):  # noqa: F811
    """Blocks of v4 wait for one another: at most two of `thin` an SM, one of `wide`."""
    for kind in (np.float32, np.uint16):
        for tokens in (1, 64, 65, 4096):
            rows = (4, 5120), (5120,), (4,), (4,), (4, 4)
            shapes = *((tokens, *row) for row in rows), (24, 4 * 5120), (24,), (3,), (5120,)
            given = [np.zeros(shape, np.float32) for shape in shapes]
            given[:2] = [a.astype(kind) for a in given[:2]]
            wrapper("hc_boundary")(*on_fake(given), CONFIG, OFFICIAL)
    found = [(name, blocks) for _, name, blocks, _, _ in fake_cuda]
    small, large = [("thin", (160,))] * 2, ("wide", (128,))
    assert found == [*small, large, large, *small, ("wide", (96,)), large]


def test_version_follows_sizes_and_numerics(fake_cuda):  # noqa: F811
    for s, width, numerics in [
        (4, 64, OFFICIAL),
        (4, 64, FLOAT32),
        (3, 64, OFFICIAL),
        (4, 96, OFFICIAL),
    ]:
        wrapper("hc_boundary")(*on_fake(inputs(2, s, width)), CONFIG, numerics)
    wrapper("hc_boundary")(*on_fake(inputs(1100, 4, 64)), CONFIG, OFFICIAL)
    names = [launch[1] for launch in fake_cuda]
    assert names == ["thin", "boundary", "boundary", "boundary", "wide"]


def test_wrapper_names_the_argument_that_is_wrong(fake_cuda):  # noqa: F811
    run = wrapper("hc_boundary")
    for at, name in enumerate(NAMES):
        given = on_fake(inputs(3))
        wrongs = [(np.array(given[at]), TypeError), (given[at].astype(np.float64), TypeError)]
        shape = given[at][0] if name == "streams" else given[at][..., :-1]
        for wrong, kind in [*wrongs, (shape, ValueError)]:
            given[at] = wrong
            with pytest.raises(kind, match=f"^{name}: expected"):
                run(*given, CONFIG, OFFICIAL)
    with pytest.raises(ValueError, match=r"^version: expected one of v1"):
        run(*on_fake(inputs(3)), CONFIG, OFFICIAL, version="v9")
    with pytest.raises(ValueError, match=r"^version: v4 needs bf16 numbers"):
        run(*on_fake(inputs(3)), CONFIG, FLOAT32, version="v4")
    with pytest.raises(ValueError, match=r"^streams: MXFP8 needs a multiple of 32"):
        run(*on_fake(inputs(3, 4, 72)), CONFIG, OFFICIAL, fp8=True)
    assert not fake_cuda
