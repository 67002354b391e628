"""Rotation by position against complex numbers, the released frequencies, and what it preserves."""

import cmath
import math
from types import SimpleNamespace

import numpy as np
import pytest
from compare import assert_any_layout, assert_close, assert_same, repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41 import preset
from dsv41.config import RopeScaling
from dsv41.rope import frequencies, rotate

FLASH = preset("v4.1-flash")


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def positions(*values):
    return np.array(values, np.int64)


def slow_rotate(x, position, freqs, sign=1):
    """One vector, its tail as complex numbers in float64, the angle rounded to float32."""
    out = [float(v) for v in x]
    first = len(out) - 2 * len(freqs)
    for i, f in enumerate(freqs):
        angle = float(np.float32(np.float32(position) * np.float32(f)))
        z = complex(out[first + 2 * i], out[first + 2 * i + 1]) * cmath.exp(sign * 1j * angle)
        out[first + 2 * i], out[first + 2 * i + 1] = z.real, z.imag
    return out


# ---- frequencies ----------------------------------------------------------------------------


def test_yarn_frequencies_of_the_released_model():
    f = frequencies(FLASH, ratio=2)
    want = {0: 1, 1: 0.687656045, 8: 0.05, 15: 0.00363553851, 16: 0.00226562493}
    want |= {20: 0.000296977785, 24: 1.95312532e-05, 25: 5.37231244e-06, 31: 5.6805294e-07}
    assert f.shape == (32,) and f.dtype == np.float32
    for i, value in want.items():
        assert_close(f"f{i}", f[i], value, rel=3e-7, floor=0)


def test_window_only_layers_have_their_own_base_and_no_yarn():
    f = frequencies(FLASH, ratio=0)
    assert_close("all", f, 10_000.0 ** (-np.arange(32) / 32), rel=1e-6)
    assert_close("f1", f[1], 0.749894202, rel=3e-7, floor=0)
    assert_close("f31", f[31], 0.00013335215, rel=3e-7, floor=0)
    assert f.dtype == np.float32


def test_both_compressed_ratios_share_their_frequencies():
    assert_same("ratio", frequencies(FLASH, 1), frequencies(FLASH, 2))


def slow_yarn(base, dim, original, factor, fast, slow):
    def bound(turns):
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = max(math.floor(bound(fast)), 0), min(math.ceil(bound(slow)), dim - 1)
    out = []
    for i in range(dim // 2):
        f = base ** (-2 * i / dim)
        ramp = min(max((i - low) / ((high - low) or 0.001), 0), 1)
        out.append(f * (1 - ramp) + f / factor * ramp)
    return out


@pytest.mark.parametrize("dim", [2, 16, 64, 128])
@pytest.mark.parametrize("original", [64, 4096, 65_536])
@pytest.mark.parametrize("fast", [32, 1])
def test_yarn_ramp_equals_its_formula_for_other_sizes(dim, original, fast):
    config = SimpleNamespace(
        qk_rope_head_dim=dim,
        compress_rope_theta=160_000,
        rope_scaling=RopeScaling(original, factor=16, beta_fast=fast, beta_slow=1),
    )
    want = slow_yarn(160_000, dim, original, 16, fast, 1)
    for i, (got, value) in enumerate(zip(frequencies.__wrapped__(config, 1), want, strict=True)):
        assert_close(f"f{i}", got, value, rel=2e-6, floor=0)


# ---- rotation -------------------------------------------------------------------------------


def test_neighbours_form_a_pair():
    # a quarter turn of pair 0 and half a turn of pair 1; pairing i with i + 2 would mix 1 with 30
    freqs = np.float32([math.pi / 2, math.pi])
    y = rotate(np.float32([[7, 1, 2, 30, 40]]), positions(1), freqs)
    assert_close("turned", y, [[7, -2, 1, -30, -40]])


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotate_equals_complex_multiplication(count, inverse):
    freqs = frequencies(FLASH, 2)[::8]
    x, at = random(count, 3, 12), np.random.default_rng(1).integers(0, 5000, size=count)
    want = [
        [slow_rotate(v, t, freqs, -1 if inverse else 1) for v in x[i]] for i, t in enumerate(at)
    ]
    y = rotate(x, at, freqs, inverse)
    assert y.dtype == np.float32
    assert_close("y", y, np.reshape(want, x.shape), rel=1e-6)


def test_angles_are_float32_products_also_far_out():
    freqs, far = frequencies(FLASH, 2), 1_000_003
    x = random(1, 64)
    y = rotate(x, positions(far), freqs)
    assert_close("float32 angle", y, [slow_rotate(x[0], far, freqs)], rel=1e-6)
    exact = np.exp(1j * far * freqs.astype(np.float64)) * (x[0, 0::2] + 1j * x[0, 1::2])
    assert np.abs(y[0, 0::2] - exact.real).max() > 1e-3  # a float64 table is another model


def test_position_zero_and_channels_in_front_keep_their_bits():
    x, freqs = random(3, 4, 10), frequencies(FLASH, 0)[:3]
    y = rotate(x, positions(0, 5, 900), freqs)
    assert_same("position 0", y[0], x[0])
    assert_same("front", y[..., :4], x[..., :4])
    assert np.abs(y[1:, :, 4:] - x[1:, :, 4:]).max() > 0.1


def test_every_head_turns_by_the_position_of_its_token():
    x, freqs, at = random(3, 4, 8), frequencies(FLASH, 0)[:4], positions(2, 77, 3)
    y = rotate(x, at, freqs)
    for h in range(4):
        assert_same("head", y[:, h], rotate(x[:, h], at, freqs))


@repeatable
@given(t=st.integers(0, 1 << 20), seed=st.integers(0, 99))
def test_inverse_undoes_it_and_lengths_stay(t, seed):
    x, freqs = random(1, 2, 64, seed=seed), frequencies(FLASH, 1)
    y = rotate(x, positions(t), freqs)
    assert_close("back", rotate(y, positions(t), freqs, inverse=True), x, rel=1e-6)
    assert_close("length", np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rel=1e-6)


@repeatable
@given(t=st.integers(0, 200), s=st.integers(0, 200), shift=st.integers(0, 300))
def test_a_query_and_a_key_see_only_their_distance(t, s, shift):
    q, k, freqs = random(1, 64), random(1, 64, seed=1), frequencies(FLASH, 0)

    def score(shift):
        turned = rotate(q, positions(t + shift), freqs) * rotate(k, positions(s + shift), freqs)
        return turned.astype(np.float64).sum()

    # the angle of pair 0 is a float32 below 512: its last bit is 2^-15
    assert abs(score(shift) - score(0)) < 64 * 2.0**-15


def test_rotate_reads_strides_and_leaves_its_input():
    freqs, at = frequencies(FLASH, 0)[:4], positions(0, 1, 900)
    for inverse in (False, True):
        for shape in [(3, 8), (3, 2, 10)]:
            assert_any_layout(
                "rotate", lambda x, i=inverse: rotate(x, at, freqs, i), random(*shape)
            )


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_any_integer_positions_give_float32(dtype):
    x = random(2, 8)
    y = rotate(x, np.array([3, 70_000], dtype), frequencies(FLASH, 0)[:4])
    assert y.dtype == np.float32
    assert_same("int64", y, rotate(x, positions(3, 70_000), frequencies(FLASH, 0)[:4]))
