"""bf16, E4M3, E2M1 and E8M0 against numbers by hand, a slow search, and another library."""

import math

import ml_dtypes
import numpy as np
import pytest
from compare import assert_any_layout, assert_same, repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41.formats import (
    E2M1,
    E4M3,
    decode_bf16,
    decode_e8m0,
    encode_bf16,
    encode_e8m0_ceil,
    f32,
    pack_nibbles,
    round_bf16,
    unpack_nibbles,
)

ALL_BYTES = np.arange(256).astype(np.uint8)
ALL_BF16 = np.arange(1 << 16).astype(np.uint16)
FOREIGN = {"E2M1": ml_dtypes.float4_e2m1fn, "E4M3": ml_dtypes.float8_e4m3fn}
finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def just_below(x):
    return np.nextafter(np.float32(x), np.float32(-np.inf))


def just_above(x):
    return np.nextafter(np.float32(x), np.float32(np.inf))


def nearest_code(fmt, x):
    """Slow and obvious: try every non-negative code, on a tie take the even one."""
    values = [float(fmt.table[code]) for code in range(2 ** (fmt.bits - 1))]
    legal = [code for code, value in enumerate(values) if not math.isnan(value)]
    magnitude = min(abs(float(x)), fmt.largest)
    code = min(legal, key=lambda code: (abs(values[code] - magnitude), code % 2))
    return code + (2 ** (fmt.bits - 1) if math.copysign(1, x) < 0 else 0)


# ---- E2M1 -----------------------------------------------------------------------------------

E2M1_VALUES = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1_TIES = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def test_e2m1_codes_are_sign_then_index_into_eight_magnitudes():
    assert_same("positive", E2M1.decode(np.arange(8).astype(np.uint8)), E2M1_VALUES)
    assert_same("negative", E2M1.decode(np.arange(8, 16).astype(np.uint8)), -E2M1_VALUES)


def test_e2m1_decode_ignores_the_other_nibble():
    assert_same("high bits", E2M1.decode(ALL_BYTES), E2M1.decode(ALL_BYTES % np.uint8(16)))


def test_e2m1_ties_go_to_the_even_code():
    codes = [0x0, 0x2, 0x2, 0x4, 0x4, 0x6, 0x6]
    assert_same("positive ties", E2M1.encode(E2M1_TIES), codes)
    assert_same("values", E2M1.decode(E2M1.encode(E2M1_TIES)), [0, 1, 1, 2, 2, 4, 4])
    assert_same("negative ties", E2M1.encode(-E2M1_TIES), [8 + code for code in codes])


def test_e2m1_one_step_beside_a_tie_goes_to_the_nearer_value():
    below, above = E2M1.encode(just_below(E2M1_TIES)), E2M1.encode(just_above(E2M1_TIES))
    assert_same("below", E2M1.decode(below), [0, 0.5, 1, 1.5, 2, 3, 4])
    assert_same("above", E2M1.decode(above), [0.5, 1, 1.5, 2, 3, 4, 6])
    assert_same("-below", E2M1.encode(-just_below(E2M1_TIES)), below | np.uint8(8))
    assert_same("-above", E2M1.encode(-just_above(E2M1_TIES)), above | np.uint8(8))


def test_e2m1_sums_over_a_fine_grid():
    grid = np.arange(-512, 513).astype(np.float32) / 64
    values = E2M1.decode(E2M1.encode(grid)).astype(np.float64)
    assert np.abs(values).sum() == 3844.0
    assert values.sum() == 0


def test_e2m1_keeps_signed_zero_and_saturates():
    x = np.float32([0.0, -0.0, -0.2, -0.25, 6, 7, 1e30, np.inf, -np.inf])
    assert_same("codes", E2M1.encode(x), [0x0, 0x8, 0x8, 0x8, 0x7, 0x7, 0x7, 0x7, 0xF])


def test_rounding_to_bf16_first_changes_the_code():
    x = np.float32([1.2500001192092896, 2.500000238418579])
    assert_same("direct", E2M1.decode(E2M1.encode(x)), [1.5, 3.0])
    assert_same("through bf16", E2M1.decode(E2M1.encode(round_bf16(x))), [1.0, 2.0])


# ---- E4M3 -----------------------------------------------------------------------------------


def test_e4m3_table_facts():
    values = E4M3.decode(ALL_BYTES)
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x7F, 0xFF]
    assert np.nanmax(values) == 448 and values[0x7E] == 448
    positive = values[1:0x7F].astype(np.float64)
    assert positive.min() == values[1] == 2**-9
    assert positive.sum() == 5407.875
    assert len(np.unique(values[np.isfinite(values)])) == 253
    assert not np.isinf(values).any()


def test_e4m3_values_by_hand():
    # 1.0 = 0 0111 000; 0.171875 = 1.375 * 2^-3 = 0 0100 011; -1.75 = 1 0111 110
    assert_same("values", E4M3.decode(np.uint8([0x38, 0x23, 0xBE])), [1.0, 0.171875, -1.75])


def test_e4m3_clamps_before_it_casts():
    x = np.float32([448, 464, 464.00003, 1000, -1000, np.inf, -np.inf])
    assert_same("saturated", E4M3.encode(x), [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE])


def test_e4m3_carries_nan():
    codes = E4M3.encode(np.float32([np.nan, -np.nan, 1]))
    assert np.isnan(E4M3.decode(codes)).tolist() == [True, True, False]


# ---- both small floats ----------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [E2M1, E4M3], ids=lambda f: f.name)
def test_decode_agrees_with_ml_dtypes_on_every_code(fmt):
    codes = np.arange(2**fmt.bits).astype(np.uint8)
    got, want = fmt.decode(codes), codes.view(FOREIGN[fmt.name]).astype(np.float32)
    assert_same("NaN", np.isnan(got), np.isnan(want))
    assert_same("numbers", got[~np.isnan(got)], want[~np.isnan(want)])


@pytest.mark.parametrize("fmt", [E2M1, E4M3], ids=lambda f: f.name)
def test_encode_agrees_with_ml_dtypes_on_every_bf16_value_and_its_float32_neighbours(fmt):
    bf16 = decode_bf16(ALL_BF16)
    bf16 = bf16[np.isfinite(bf16)]  # every tie between two codes is a bf16 value
    for x in (bf16, just_below(bf16), just_above(bf16)):
        x = x[np.isfinite(x)]
        clamped = np.clip(x, -fmt.largest, fmt.largest)  # ml_dtypes turns overflow into NaN
        assert_same(fmt.name, fmt.encode(x), clamped.astype(FOREIGN[fmt.name]).view(np.uint8))


@pytest.mark.parametrize("fmt", [E2M1, E4M3], ids=lambda f: f.name)
def test_every_finite_code_survives_decode_and_encode(fmt):
    codes = np.arange(2**fmt.bits).astype(np.uint8)
    codes = codes[np.isfinite(fmt.decode(codes))]
    assert_same(fmt.name, fmt.encode(fmt.decode(codes)), codes)


@pytest.mark.parametrize("fmt", [E2M1, E4M3], ids=lambda f: f.name)
def test_encode_takes_the_nearest_code_and_the_even_one_on_a_tie(fmt):
    values = fmt.table[: 2 ** (fmt.bits - 1) - fmt.has_nan].astype(np.float64)
    ties = np.float32((values[1:] + values[:-1]) / 2)
    x = np.concatenate([values.astype(np.float32), ties, just_below(ties), just_above(ties)])
    x = np.concatenate([x, -x, np.float32([1e-45, -1e-45, 500, 3e38])])
    assert_same(fmt.name, fmt.encode(x), [nearest_code(fmt, v) for v in x])


@pytest.mark.parametrize("fmt", [E2M1, E4M3], ids=lambda f: f.name)
@repeatable
@given(a=finite_floats, b=finite_floats)
def test_encode_is_nearest_monotonic_and_odd(fmt, a, b):
    a, b = np.float32(min(a, b)), np.float32(max(a, b))
    codes = fmt.encode(np.array([a, b]))
    assert_same("codes", codes, [nearest_code(fmt, a), nearest_code(fmt, b)])
    low, high = fmt.decode(codes)
    assert low <= high
    assert_same("negated", fmt.encode(-np.array([a, b])), codes ^ np.uint8(2 ** (fmt.bits - 1)))


# ---- bf16 -----------------------------------------------------------------------------------


def test_bf16_decode_agrees_with_ml_dtypes_on_all_codes():
    want = ALL_BF16.view(ml_dtypes.bfloat16).astype(np.float32)
    assert_same("decode", decode_bf16(ALL_BF16), want)


def test_bf16_every_code_survives_and_nan_stays_nan():
    values = decode_bf16(ALL_BF16)
    nan = np.isnan(values)
    assert_same("not NaN", encode_bf16(values)[~nan], ALL_BF16[~nan])
    assert np.isnan(round_bf16(values)[nan]).all()
    assert np.isnan(decode_bf16(encode_bf16(values))[nan]).all()
    assert_same("both at once", round_bf16(values)[~nan], values[~nan])


def test_bf16_between_every_two_codes_rounds_to_nearest_even():
    lower = ALL_BF16[np.isfinite(decode_bf16(ALL_BF16))].astype(np.uint32)
    upper, tie = lower + 1, (lower << 16) + 0x8000
    up = [(tie - 1, lower), (tie, lower + lower % 2), (tie + 1, upper)]
    for bits, code in up:
        x, code = bits.view(np.float32), code.astype(np.uint16)
        assert_same("encoded", encode_bf16(x), code)
        assert_same("rounded", round_bf16(x), decode_bf16(code))


def test_bf16_rounds_once_and_never_turns_nan_into_a_number():
    x = np.float32([1.00390625, 1.01171875, 3.3961775e38, -3.3961775e38])
    assert_same("rounded", round_bf16(x), [1.0, 1.015625, np.inf, -np.inf])
    # adding to these bits would give inf, -0, and -inf
    nan = np.uint32([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001]).view(np.float32)
    assert np.isnan(round_bf16(nan)).all()
    assert np.isnan(decode_bf16(encode_bf16(nan))).all()


# ---- E8M0 -----------------------------------------------------------------------------------


def test_e8m0_decode_agrees_with_ml_dtypes_on_all_codes():
    want = ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert_same("decode", decode_e8m0(ALL_BYTES), want)


def test_e8m0_is_an_exponent_and_never_the_number_in_the_byte():
    values = decode_e8m0(np.uint8([120, 127, 130, 0]))
    assert_same("values", values, np.float32([0.0078125, 1, 8, 5.877472e-39]))
    assert np.isnan(decode_e8m0(np.uint8([255])))


def test_e8m0_ceil_at_and_beside_every_power_of_two():
    codes = np.arange(2, 254).astype(np.uint8)  # normal float32 on both sides
    power = decode_e8m0(codes)
    assert_same("exact", encode_e8m0_ceil(power), codes)
    assert_same("one step above", encode_e8m0_ceil(just_above(power)), codes + np.uint8(1))
    assert_same("one step below", encode_e8m0_ceil(just_below(power)), codes)


def test_e8m0_ceil_does_not_go_through_a_float32_logarithm():
    x = np.float32(2.0**20 * (1 + 2.0**-23))
    assert decode_e8m0(encode_e8m0_ceil(np.array([x])))[0] == 2**21


@repeatable
@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_e8m0_ceil_is_the_smallest_power_not_below(x):
    byte = int(encode_e8m0_ceil(np.float32([x]))[0])
    assert 2.0 ** (byte - 128) < x <= 2.0 ** (byte - 127)


# ---- two codes a byte -----------------------------------------------------------------------


def test_the_even_channel_lies_in_the_low_nibble():
    codes = np.arange(16).astype(np.uint8)
    packed = pack_nibbles(codes)
    assert packed.tobytes().hex(" ") == "10 32 54 76 98 ba dc fe"
    assert_same("unpacked", unpack_nibbles(packed), codes)


def test_every_byte_unpacks_to_its_two_nibbles():
    pairs = unpack_nibbles(ALL_BYTES.reshape(4, 64))
    assert_same("low", pairs[:, 0::2], ALL_BYTES.reshape(4, 64) % np.uint8(16))
    assert_same("high", pairs[:, 1::2], ALL_BYTES.reshape(4, 64) // np.uint8(16))
    assert_same("packed again", pack_nibbles(pairs), ALL_BYTES.reshape(4, 64))


def test_an_odd_number_of_codes_is_refused():
    with pytest.raises(ValueError, match=r"codes: .*\(2, 3\)"):
        pack_nibbles(np.zeros((2, 3), np.uint8))


# ---- shapes, types, strides -----------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [E2M1.encode, E4M3.encode, encode_bf16, round_bf16, encode_e8m0_ceil],
    ids=["e2m1", "e4m3", "bf16", "round_bf16", "e8m0"],
)
@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (65, 6), (2, 3, 64)])
def test_encoders_read_strides_and_leave_their_input(function, shape):
    x = np.abs(np.random.default_rng(0).normal(size=shape)).astype(np.float32)
    assert_any_layout(function.__name__, function, x)


@pytest.mark.parametrize(
    "function",
    [E2M1.decode, E4M3.decode, decode_e8m0, pack_nibbles, unpack_nibbles],
    ids=["e2m1", "e4m3", "e8m0", "pack", "unpack"],
)
def test_decoders_read_strides_and_leave_their_input(function):
    codes = np.random.default_rng(0).integers(0, 16, size=(5, 6)).astype(np.uint8)
    assert_any_layout(function.__name__, function, codes)


def test_types_in_and_out():
    x = np.linspace(0.1, 1, 6).reshape(2, 3)
    assert x.dtype == np.float64
    for encode, dtype in [
        (E2M1.encode, np.uint8),
        (E4M3.encode, np.uint8),
        (encode_bf16, np.uint16),
        (encode_e8m0_ceil, np.uint8),
        (round_bf16, np.float32),
        (f32, np.float32),
    ]:
        assert encode(x).dtype == dtype and encode(x).shape == (2, 3)
        assert encode(x[:0]).dtype == dtype and encode(x[:0]).shape == (0, 3)
    for decode in (E2M1.decode, E4M3.decode, decode_e8m0):
        assert decode(np.zeros((0, 4), np.uint8)).dtype == np.float32
    assert decode_bf16(ALL_BF16).dtype == np.float32
    assert f32([1, 2]).dtype == f32(3).dtype == np.float32


@pytest.mark.parametrize("fmt", [E4M3, E2M1], ids=lambda f: f.name)
def test_rounding_without_codes_gives_the_value_of_the_code(fmt):
    """Every bf16 number, and float32 numbers around every tie, signs of zero included."""
    every = decode_bf16(np.arange(65536).astype(np.uint16))
    grid = fmt.decode(np.arange(2 ** (fmt.bits - 1), dtype=np.uint8))
    grid = np.sort(grid[np.isfinite(grid)]).astype(np.float64)
    ties = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    near = np.concatenate(
        [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9e9))]
    )
    x = np.concatenate([every[np.isfinite(every)], near, -near])
    assert_same("rounded", fmt.round(x), fmt.decode(fmt.encode(x)))
