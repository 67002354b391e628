"""Block scaling and its three cache formats: bytes by hand, a slow loop, what must never move.

The loop knows nothing of bit tricks: it tries scale bytes from below and casts with ml_dtypes.
"""

import dataclasses
import warnings

import ml_dtypes
import numpy as np
import pytest
from compare import assert_any_layout, assert_close, assert_same, repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41.formats import decode_e8m0, round_bf16
from dsv41.quant import (
    ACTIVATION_FP8,
    FLOAT,
    FLOAT32,
    INDEX_FP4,
    MAIN_KV_FP4,
    OFFICIAL,
    WEIGHT_FP4,
    WEIGHT_FP8,
    WINDOW_KV_FP8,
    QuantizedWeight,
    dequantize_tiles,
    quantize_tiles,
    quantize_weight,
    require_finite_weight,
)

CACHE_FORMATS = [MAIN_KV_FP4, INDEX_FP4, ACTIVATION_FP8]
FORMATS = [*CACHE_FORMATS, WEIGHT_FP4, WEIGHT_FP8]
FOREIGN = {"E2M1": ml_dtypes.float4_e2m1fn, "E4M3": ml_dtypes.float8_e4m3fn}
by_name = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)


def group(fmt, *values):
    """One group of `fmt` that starts with these values and continues with zeros."""
    x = np.zeros((1, fmt.group), np.float32)
    x[0, : len(values)] = values
    return x


def slow_scale(fmt, amax):
    """-> (byte, value) of the scale of a group, by search."""
    amax = max(np.float32(amax), np.float32(fmt.floor))
    if fmt.scale == "e4m3":
        value = min(amax / np.float32(fmt.element.largest), np.float32(448))
        code = np.array(value).astype(ml_dtypes.float8_e4m3fn)
        return int(code.view(np.uint8)), float(code)
    needed = float(amax * np.float32(1 / fmt.element.largest))
    byte = next(byte for byte in range(1, 255) if 2.0 ** (byte - 127) >= needed)
    return byte, 2.0 ** (byte - 127)


def slow_quantize(fmt, x):
    """x (R, C) -> codes and scales as in `fmt.quantize`, one group at a time."""
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((len(x), x.shape[1] // fmt.group), np.uint8)
    for r in range(len(x)):
        for g in range(scales.shape[1]):
            members = x[r, g * fmt.group : (g + 1) * fmt.group]
            byte, value = slow_scale(fmt, max(abs(float(v)) for v in members))
            ratio = np.clip(members / np.float32(value), -fmt.element.largest, fmt.element.largest)
            scales[r, g] = byte
            codes[r, g * fmt.group : (g + 1) * fmt.group] = ratio.astype(
                FOREIGN[fmt.element.name]
            ).view(np.uint8)
    return codes, scales


def varied(rows, channels, seed=0):
    """bf16 values whose groups of 16 have sizes from 2^-130 to 2^60, some zero."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.integers(-20, 12, size=(rows, channels // 16, 1)).astype(np.float32))
    size[rng.random(size.shape) < 0.1] = 0
    size[0, 0], size[-1, -1] = 2.0**-130, 2.0**60
    x = rng.normal(size=(rows, channels // 16, 16)).astype(np.float32) * size
    return round_bf16(x.reshape(rows, channels))


# ---- main KV: E2M1 with an E4M3 scale per 16 ------------------------------------------------


@pytest.mark.parametrize(
    ("values", "scale", "codes", "decoded"),
    [
        ((), 0x01, (0, 0), (0, 0)),
        ((0.005,), 0x01, (5, 0), (0.005859375, 0)),
        ((0.006, -0.003), 0x01, (5, 0xB, 0), (0.005859375, -0.0029296875, 0)),
        ((3000, -1500, 100), 0x7E, (7, 0xD, 0), (2688, -1344, 0)),
        ((0.005859375,), 0x01, (5, 0), (0.005859375, 0)),
        ((1,), 0x23, (7, 0), (1.03125, 0)),
    ],
    ids=["zero", "below the floor", "two below", "scale saturates", "3 * 2^-9", "one"],
)
def test_main_kv_group_by_hand(values, scale, codes, decoded):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an all-zero group must not divide 0 by 0
        got_codes, got_scale = MAIN_KV_FP4.quantize(group(MAIN_KV_FP4, *values))
    assert_same("scale", got_scale, [[scale]])
    assert_same("codes", got_codes[0, : len(codes)], codes)
    got = MAIN_KV_FP4.dequantize(got_codes, got_scale)
    assert_same("decoded", got[0, : len(decoded)], decoded)
    assert not got_codes[0, len(codes) :].any()


@pytest.mark.parametrize(("amax", "scale"), [(1.0, 0.171875), (3.3, 0.5625), (10, 1.625)])
def test_main_kv_scale_is_not_a_power_of_two(amax, scale):
    _, scales = MAIN_KV_FP4.quantize(group(MAIN_KV_FP4, amax))
    assert_same("scale", scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32), [[scale]])


def test_main_kv_groups_of_16_do_not_share_a_scale():
    small = np.float32(0.01) * np.arange(1, 17).astype(np.float32)
    x = np.concatenate([small, np.full(16, 6, np.float32)])[None]
    codes, scales = MAIN_KV_FP4.quantize(x)
    assert_same("scales", scales, [[0x0E, 0x38]])
    want = [0.013671875] * 2 + [0.02734375, 0.041015625] + [0.0546875] * 2
    want += [0.08203125] * 3 + [0.109375] * 4 + [0.1640625] * 3 + [6] * 16
    assert_same("decoded", MAIN_KV_FP4.dequantize(codes, scales), [want])


def test_the_element_is_divided_by_the_scale_not_multiplied_by_its_reciprocal():
    # 0.0732421875 / 0.029296875 is exactly the tie 2.5; times float32(1 / 0.029296875) is above it
    codes, scales = MAIN_KV_FP4.quantize(group(MAIN_KV_FP4, 0.17578125, 0.0732421875))
    assert scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) == 0.029296875
    assert_same("codes", codes[0, :2], [7, 4])


def test_main_kv_is_not_idempotent_between_the_two_smallest_scales():
    # amax 9 * 2^-9 takes scale 2 * 2^-9 and becomes 8 * 2^-9, whose own scale is 1 * 2^-9
    once = MAIN_KV_FP4.fake(group(MAIN_KV_FP4, 9 * 2.0**-9))
    assert once[0, 0] == 8 * 2.0**-9
    assert MAIN_KV_FP4.fake(once)[0, 0] == 6 * 2.0**-9


# ---- MX formats: E8M0 scale per 32 ----------------------------------------------------------


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        *[(0, 1), (1e-45, 1), (2.0**-126, 1), (2.0**-123, 2), (0.75, 124), (1, 125), (1.5, 125)],
        *[(3, 126), (4, 127), (6, 127), (np.nextafter(np.float32(6), np.float32(9)), 128)],
        *[(6.01, 128), (7.9, 128), (8, 128), (12, 128), (448, 134)],
    ],
)
def test_mxfp4_scale_is_the_smallest_power_of_two_that_does_not_clip(amax, byte):
    codes, scales = INDEX_FP4.quantize(group(INDEX_FP4, amax))
    assert_same("byte", scales, [[byte]])
    if amax == 0:
        assert not INDEX_FP4.dequantize(codes, scales).any()


def test_mxfp4_scale_at_every_power_of_two_times_six():
    k = np.arange(-120, 120)
    x = np.zeros((len(k), 32), np.float32)
    x[:, 5] = np.float32(6) * np.exp2(k.astype(np.float32))
    _, scales = INDEX_FP4.quantize(x)
    assert_same("bytes", scales[:, 0], (k + 127).tolist())


def test_mxfp4_maximum_is_rounded_up_not_clipped():
    assert INDEX_FP4.fake(group(INDEX_FP4, 7.9))[0, 0] == 8


def test_mxfp8_scale_bytes_by_hand():
    above = np.nextafter(np.float32(448), np.float32(np.inf))
    for amax, byte in [(0, 105), (0.02734375, 113), (448, 127), (above, 128)]:
        codes, scales = WINDOW_KV_FP8.quantize(group(WINDOW_KV_FP8, amax))
        assert_same(f"byte for {amax}", scales, [[byte]])
        assert amax or not WINDOW_KV_FP8.dequantize(codes, scales).any()


@pytest.mark.parametrize("fmt", [ACTIVATION_FP8, INDEX_FP4, WEIGHT_FP4], ids=lambda f: f.name)
@repeatable
@given(amax=st.floats(2.0**-100, 2.0**100, width=32))
def test_e8m0_scale_is_minimal(fmt, amax):
    _, scales = fmt.quantize(group(fmt, 0, -amax))
    scale = float(decode_e8m0(scales)[0, 0])
    needed = max(np.float32(amax), np.float32(fmt.floor)) * np.float32(1 / fmt.element.largest)
    assert scale / 2 < needed <= scale


def test_each_format_has_its_own_floor():
    tiny = 2.0**-60
    x = np.full((1, 32), tiny, np.float32)
    assert not ACTIVATION_FP8.fake(x).any() and not MAIN_KV_FP4.fake(x).any()
    for fmt in (INDEX_FP4, WEIGHT_FP4, WEIGHT_FP8):
        assert_same(fmt.name, fmt.fake(x), x)
    at_floor = group(ACTIVATION_FP8, 1e-4)
    assert_same("1e-4", ACTIVATION_FP8.quantize(at_floor)[1], [[105]])
    assert_same("floor, then / 448", ACTIVATION_FP8.quantize(at_floor / 8)[1], [[105]])


# ---- every block format ---------------------------------------------------------------------


@by_name
def test_quantize_equals_a_loop_over_groups(fmt):
    x = varied(9, 64)
    codes, scales = fmt.quantize(x)
    want_codes, want_scales = slow_quantize(fmt, x)
    assert_same("scales", scales, want_scales)
    assert_same("codes", codes, want_codes)


@by_name
def test_dequantize_is_code_times_scale(fmt):
    codes, scales = fmt.quantize(varied(9, 64))
    element = codes.view(FOREIGN[fmt.element.name]).astype(np.float64)
    kind = ml_dtypes.float8_e4m3fn if fmt.scale == "e4m3" else ml_dtypes.float8_e8m0fnu
    factor = scales.view(kind).astype(np.float64).repeat(fmt.group, axis=1)
    assert_same("values", fmt.dequantize(codes, scales), (element * factor).astype(np.float32))


@pytest.mark.parametrize("fmt", CACHE_FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(1, 32), (2, 64), (63, 32), (2, 3, 512), (0, 32)])
def test_a_record_read_back_is_the_fake_quantised_vector(fmt, shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    records = fmt.encode(x)
    assert records.dtype == np.uint8
    assert records.shape == (*shape[:-1], fmt.record_bytes(shape[-1]))
    assert_same("read back", fmt.decode(records, shape[-1]), fmt.fake(x))


def test_record_sizes_give_890_bytes_a_token():
    main, key = MAIN_KV_FP4.record_bytes(512), INDEX_FP4.record_bytes(128)
    window = WINDOW_KV_FP8.record_bytes(512)
    assert (main, window, key) == (288, 528, 68)
    assert (main + key) * 3 // 2 + (main + key) == 890  # three sources at 1/2, one at 1


def test_record_layout_codes_first_low_nibble_first_then_scales():
    # 0, .5, 1, 1.5, 2, 3, 4, 6 twice: scale 1.0 = 0x38; then 12 and fifteen -12: scale 2.0 = 0x40
    first = [0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2
    x = np.float32([[*first, 12, *[-12] * 15]])
    record = MAIN_KV_FP4.encode(x)[0]
    assert record.tobytes().hex() == "10325476" * 2 + "f7" + "ff" * 7 + "3840"
    assert_same("decoded", MAIN_KV_FP4.decode(record[None], 32), x)


def test_window_record_is_32_bytes_of_e4m3_then_one_exponent_a_group():
    record = WINDOW_KV_FP8.encode(np.float32([[448, *[1] * 31, *[2] * 32]]))[0]
    # 448: scale 2^0. 2: amax / 448 rounds up to 2^-7, so 2 is stored as 256 = 0 1111 000
    assert record.tobytes().hex() == "7e" + "38" * 31 + "78" * 32 + "7f78"


@by_name
def test_zeroed_storage_reads_as_zero(fmt):
    records = fmt.new_records((2, 3), 64)
    assert records.shape == (2, 3, fmt.record_bytes(64)) and records.dtype == np.uint8
    assert_same("zeros", fmt.decode(records, 64), np.zeros((2, 3, 64), np.float32))


@by_name
@repeatable
@given(seed=st.integers(0, 999))
def test_quantising_twice_changes_nothing(fmt, seed):
    x = varied(3, 64, seed)
    if fmt is MAIN_KV_FP4:  # stay away from the exception above
        x[:, ::16] = np.maximum(x[:, ::16], 16 * 2.0**-9)
    once = fmt.fake(x)
    assert_same(fmt.name, fmt.fake(once), once)


@by_name
@repeatable
@given(seed=st.integers(0, 999))
def test_negating_the_input_flips_the_sign_bits_only(fmt, seed):
    x = varied(3, 64, seed)
    codes, scales = fmt.quantize(x)
    flipped, same = fmt.quantize(-x)
    assert_same("scales", same, scales)
    assert_same("codes", flipped, codes ^ np.uint8(2 ** (fmt.element.bits - 1)))


@by_name
@repeatable
@given(seed=st.integers(0, 999))
def test_order_within_a_group_is_kept(fmt, seed):
    x = np.sort(np.random.default_rng(seed).normal(size=(4, fmt.group)).astype(np.float32), axis=1)
    assert (np.diff(fmt.fake(x), axis=1) >= 0).all()


@by_name
def test_the_error_is_at_most_half_a_step_of_the_largest_element(fmt):
    x = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)
    # the largest lies in [4, 6] with steps of 2, or in [256, 448] with steps of 32, or finer
    half_step = {"E2M1": 1 / 4, "E4M3": 16 / 256}[fmt.element.name]
    amax = np.abs(x).reshape(64, -1, fmt.group).max(axis=2).repeat(fmt.group, axis=1)
    assert (np.abs(fmt.fake(x) - x) <= half_step * amax).all()


@by_name
def test_a_group_never_depends_on_its_neighbours(fmt):
    x = varied(8, 128)
    codes, scales = fmt.quantize(x)
    for r in (0, 3, 7):
        for g in range(128 // fmt.group):
            at = slice(g * fmt.group, (g + 1) * fmt.group)
            alone, scale = fmt.quantize(x[r : r + 1, at])
            assert_same("codes", alone[0], codes[r, at])
            assert_same("scale", scale[0, 0], scales[r, g])


@by_name
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [(0, 0), (2, 33), (4, 63)])
def test_nan_and_inf_are_refused_with_their_position(fmt, bad, position):
    x = varied(5, 64)
    x[position] = bad
    with pytest.raises(ValueError, match=rf"got -?(nan|inf) at \({position[0]}, {position[1]}\)"):
        fmt.quantize(x)


def test_a_poisoned_group_is_reported_and_its_neighbour_would_be_fine():
    x = np.concatenate([group(MAIN_KV_FP4, np.nan), group(MAIN_KV_FP4, 0.006, -0.003)], axis=1)
    with pytest.raises(ValueError, match=r"got nan at \(0, 0\)"):
        MAIN_KV_FP4.encode(x)
    x[0, 0] = 0
    assert_same("second group", MAIN_KV_FP4.quantize(x)[0][0, 16:18], [5, 0xB])


@by_name
def test_a_last_axis_that_does_not_fill_its_groups_is_refused(fmt):
    with pytest.raises(ValueError, match=rf"of {fmt.group}, got shape \(2, {fmt.group + 1}\)"):
        fmt.quantize(np.zeros((2, fmt.group + 1), np.float32))


@by_name
def test_memory_layout_changes_nothing(fmt):
    x = np.random.default_rng(2).normal(size=(3, 64)).astype(np.float32)
    assert_any_layout("quantize", fmt.quantize, x)
    assert_any_layout("encode", fmt.encode, x)
    assert_any_layout("fake", fmt.fake, x)
    records = fmt.encode(x)
    assert_any_layout("decode", lambda r: fmt.decode(r, 64), records)


@by_name
def test_values_are_float32(fmt):
    x = np.ones((2, 64), np.float32)
    assert fmt.fake(x).dtype == np.float32
    assert fmt.decode(fmt.encode(x), 64).dtype == np.float32
    assert fmt.fake(x.astype(np.float64)).dtype == np.float32


# ---- weights --------------------------------------------------------------------------------


def test_tiles_are_32_by_32():
    codes = np.full((33, 65), 0x38, np.uint8)
    scales = np.uint8([[127, 128, 129], [130, 131, 132]])
    w = dequantize_tiles(codes, scales)
    assert (w[31, 63], w[0, 64], w[32, 64]) == (2, 4, 32)
    assert w.astype(np.float64).sum() == 4000


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (3, 3), (33, 65)])
def test_a_scale_grid_for_other_tiles_is_refused(shape):
    with pytest.raises(ValueError, match=r"scales: .*\(2, 3\)"):
        dequantize_tiles(np.zeros((33, 65), np.uint8), np.zeros(shape, np.uint8))


@pytest.mark.parametrize("shape", [(1, 1), (2, 31), (32, 32), (33, 65), (64, 63)])
def test_quantize_tiles_equals_a_loop_over_tiles(shape):
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    w *= np.exp2(np.random.default_rng(1).integers(-30, 9, size=shape)).astype(np.float32)
    codes, scales = quantize_tiles(w)
    assert codes.shape == shape and codes.dtype == scales.dtype == np.uint8
    for i in range(0, shape[0], 32):
        for j in range(0, shape[1], 32):
            tile = w[i : i + 32, j : j + 32]
            byte, value = slow_scale(WEIGHT_FP8, np.abs(tile).max())
            assert scales[i // 32, j // 32] == byte
            want = (tile / np.float32(value)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            assert_same("codes", codes[i : i + 32, j : j + 32], want)


def test_a_zero_tile_and_a_tiny_tile_keep_their_digits():
    w = np.zeros((32, 64), np.float32)
    w[:, 32:] = 2.0**-100
    assert_same("values", dequantize_tiles(*quantize_tiles(w)), w)


def test_quantize_tiles_reads_strides():
    w = np.random.default_rng(0).normal(size=(33, 40)).astype(np.float32)
    assert_any_layout("quantize_tiles", quantize_tiles, w)


def test_row_weight_has_the_even_input_channel_in_the_low_nibble():
    codes = np.zeros((2, 16), np.uint8)
    codes[0, 0], codes[1, 15] = 0x72, 0xF0  # 1 and 6; 0 and -6
    weight = QuantizedWeight(codes, np.uint8([[128], [126]]), "rows")
    assert weight.shape == (2, 32)
    dense = weight.dense()
    assert (dense[0, 0], dense[0, 1], dense[1, 31]) == (2, 12, -3)
    assert np.count_nonzero(dense) == 3


@pytest.mark.parametrize("layout", ["tiles", "rows"])
def test_a_quantised_weight_is_exact_in_bf16_and_keeps_its_shape(layout):
    w = np.random.default_rng(0).normal(size=(33, 64)).astype(np.float32)
    weight = quantize_weight(w, layout)
    dense = weight.dense()
    assert weight.shape == dense.shape == w.shape and dense.dtype == np.float32
    assert_same("bf16", round_bf16(dense), dense)
    assert_close("values", dense, w, rel=0.2 if layout == "rows" else 0.04)
    again = quantize_weight(dense, layout)
    assert_same("again", again.dense(), dense)


@pytest.mark.parametrize("layout", ["tiles", "rows"])
def test_a_stored_nan_is_refused_with_the_name_of_the_tensor(layout):
    weight = quantize_weight(np.ones((2, 32), np.float32), layout)
    weight.scales[-1, 0] = 255
    named = dataclasses.replace(weight, name="layers.0.attn.wq_a.weight")
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.wq_a\.weight: weight is nan at"):
        named.dense()


def test_require_finite_weight_names_the_first_position():
    values = np.ones((3, 4), np.float32)
    assert require_finite_weight(values, "w") is values
    values[1, 2] = np.inf
    with pytest.raises(ValueError, match=r"^w: weight is inf at \(1, 2\)"):
        require_finite_weight(values, "w")


# ---- what is rounded where ------------------------------------------------------------------


def test_float32_rounds_nothing():
    x = np.float32([[1.2345678, -1e-30]])
    for fmt in (FLOAT32.activation, FLOAT32.window_kv, FLOAT32.main_kv, FLOAT32.index, FLOAT):
        assert_same("fake", fmt.fake(x), x)
        assert_same("record", fmt.decode(fmt.encode(x), 2), x)
        assert fmt.record_bytes(512) == 2048
        assert fmt.new_records((3,), 7).shape == (3, 7)
        assert fmt.new_records((3,), 7).dtype == np.float32
    assert_same("store", FLOAT32.store(x), x)
    assert FLOAT32.store(x.astype(np.float64)).dtype == np.float32


def test_official_stores_bf16_and_the_released_bytes():
    x = np.float32([1.2345678, 1.00390625])
    assert_same("store", OFFICIAL.store(x), x.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert OFFICIAL.main_kv.record_bytes(512) == 288
    assert OFFICIAL.window_kv.record_bytes(512) == 528
    assert OFFICIAL.index.record_bytes(128) == 68
    assert OFFICIAL.activation is ACTIVATION_FP8
    assert not OFFICIAL.batch_invariant


def test_one_rounding_can_be_switched_off_alone():
    plain = OFFICIAL.but(main_kv=FLOAT)
    assert plain.main_kv is FLOAT and plain.window_kv is OFFICIAL.window_kv and plain.bf16
    assert OFFICIAL.main_kv is MAIN_KV_FP4  # the original is untouched
