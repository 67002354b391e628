"""FP4 and FP8 records and RMSNorm + cast on a GPU: the definition's bits, on every code and tie."""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same
from fake_cuda import on_device

from dsv41.dispatch import find_kernel, use
from dsv41.formats import E4M3
from dsv41.ops import rmsnorm, rmsnorm_fp8
from dsv41.quant import (
    ACTIVATION_FP8,
    FLOAT32,
    INDEX_FP4,
    MAIN_KV_FP4,
    OFFICIAL,
    WEIGHT_FP4,
    WEIGHT_FP8,
    WINDOW_KV_FP8,
    fake_quantize,
    fp4_pack,
    fp4_unpack,
    fp8_pack,
    fp8_unpack,
)

BF16 = ml_dtypes.bfloat16
FORMATS = [(MAIN_KV_FP4, 512), (INDEX_FP4, 128), (WINDOW_KV_FP8, 512)]
OTHERS = [(MAIN_KV_FP4, 16), (MAIN_KV_FP4, 48), (INDEX_FP4, 32), (WEIGHT_FP4, 96), (WEIGHT_FP8, 64)]
VERSIONS = {"fp4_pack": 3, "fp4_unpack": 3, "fp8_pack": 2, "fp8_unpack": 2}
MIDPOINTS = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6])


def ops(fmt):
    """-> the operations that pack and unpack this format."""
    return (fp4_pack, fp4_unpack) if fmt.element.bits == 4 else (fp8_pack, fp8_unpack)


def versions(op, dtype):
    """Rungs of an operation's ladder for this type; only bf16 has the packed fp4 rungs."""
    count = VERSIONS[op] - (op.startswith("fp4") and dtype == np.float32)
    return [f"v{n + 1}" for n in range(count)]


def ties(dtype):
    """Groups of 16 whose amax is 6 * scale, for every E4M3 scale, holding every tie of E2M1 and, in
    float32, the neighbours of every tie: the values where a code is easiest to get wrong."""
    scales = E4M3.table[1:127].reshape(-1, 1)
    exact = scales * MIDPOINTS
    near = [exact]
    if dtype == np.float32:
        near += [np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))]
        near = [np.concatenate([n[:, :7], exact[:, 7:]], axis=1) for n in near]
    return np.concatenate([np.concatenate([n, -n], axis=1) for n in near]).reshape(-1)


def every_bf16():
    """All finite bf16 values, each in a group with one that is twice to 2^20 times as large."""
    codes = np.arange(65536, dtype=np.uint16)
    values = codes.view(BF16).astype(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 2.0**100)]
    groups = np.zeros((len(values) // 8 + 1, 16), np.float32)
    groups[:, :8].reshape(-1)[: len(values)] = values
    top = np.abs(groups[:, :8]).max(axis=1, keepdims=True)
    groups[:, 8:] = top * np.float32([2, 3, 5, 8, 64, 2.0**10, 2.0**15, 2.0**20])
    return groups.reshape(-1)


def awkward(channels, dtype):
    """Rows of `channels`: ties, every bf16, subnormals, signed zeros, huge values, random sizes."""
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.integers(-140, 100, (40, channels // 16, 1)).astype(np.float32))
    some = (rng.normal(size=(40, channels // 16, 16)).astype(np.float32) * sizes).reshape(-1)
    signed_zeros = np.float32([0, -0.0]).repeat(channels)
    huge = np.float32([3e38, -3e38]).repeat(channels)
    flat = np.concatenate([ties(dtype), every_bf16(), some, signed_zeros, huge])
    flat = flat[: len(flat) // channels * channels]
    return flat.reshape(-1, channels).astype(dtype)


def random_records(fmt, channels):
    """Random codes under every scale byte."""
    split = channels * fmt.element.bits // 8
    records = np.zeros((256, fmt.record_bytes(channels)), np.uint8)
    records[:, :split] = np.random.default_rng(1).integers(0, 256, (256, split))
    groups = channels // fmt.group
    records[:, split:] = (np.arange(256)[:, None] + 37 * np.arange(groups)) % 256
    return records


def assert_same_values(name, got, want):
    """Same bits, where any NaN is as good as another."""
    got, want = np.array(got), np.array(want)
    nan = np.isnan(want.astype(np.float32))
    assert np.array_equal(np.isnan(got.astype(np.float32)), nan), name
    got[nan] = want[nan] = 0
    assert_same(name, got, want)


# ---- on a CUDA device -----------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("fmt", "channels"), FORMATS + OTHERS, ids=lambda p: getattr(p, "name", p))
def test_every_version_packs_the_definitions_bits(cupy, fmt, channels, dtype):
    from dsv41_kernels.records import pack

    op, x = ops(fmt)[0], awkward(channels, dtype)
    want = op.definition(x, fmt)
    for version in versions(op.__name__, dtype):
        got = pack(op.__name__, cupy.asarray(x), fmt, version).get()
        assert_same(f"{op.__name__} {version}", got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("fmt", "channels"), FORMATS + OTHERS, ids=lambda p: getattr(p, "name", p))
def test_every_version_unpacks_the_definitions_bits(cupy, fmt, channels, dtype):
    from dsv41_kernels.records import unpack

    op, records = ops(fmt)[1], random_records(fmt, channels)
    with np.errstate(all="ignore"):
        want = op.definition(records, channels, fmt, dtype)
    for version in versions(op.__name__, dtype):
        got = unpack(op.__name__, cupy.asarray(records), channels, fmt, dtype, version).get()
        assert_same_values(f"{op.__name__} {version}", got, want)


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "channels"), FORMATS + OTHERS, ids=lambda p: getattr(p, "name", p))
def test_every_version_rounds_to_the_definitions_bits(cupy, fmt, channels):
    from dsv41_kernels.fake_quantize.cupy_op import launch_fake

    x = awkward(channels, np.float32)
    with np.errstate(over="ignore"):  # the largest numbers may round up to infinity
        want, moved = fake_quantize.definition(x, fmt), cupy.asarray(x)
    for version in ("v1", "v2"):
        out = cupy.zeros_like(moved)
        launch_fake(moved, out, cupy.zeros(1, np.uint64), fmt, version)
        assert_same(f"fake_quantize {version}", out, want)
    assert_same("one row", fmt.fake(moved[:1]), want[:1])
    assert_same("no row", fmt.fake(moved[:0]), want[:0])
    assert_same("columns", fmt.fake(cupy.asfortranarray(moved)), want)
    x[1, 3], x[2, 1] = -np.inf, np.nan
    with pytest.raises(ValueError, match=r"finite input, got -inf at \(1, 3\)"):
        fmt.fake(cupy.asarray(x))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 31, 33, 257])
@pytest.mark.parametrize(("fmt", "channels"), FORMATS, ids=lambda p: getattr(p, "name", p))
def test_tails_write_nothing_behind_the_records(cupy, fmt, channels, rows):
    from dsv41_kernels.records import launch_pack, launch_unpack

    x = np.random.default_rng(rows).normal(size=(rows, channels)).astype(np.float32)
    pack, unpack = ops(fmt)
    want = pack.definition(x, fmt) if rows else fmt.new_records((0,), channels)
    for dtype in (np.float32, BF16):
        x = x.astype(BF16).astype(np.float32)
        want = pack.definition(x, fmt)
        guarded = cupy.full((rows + 2, fmt.record_bytes(channels)), 0xA5, np.uint8)
        word = cupy.zeros(1, np.uint64)
        launch_pack(pack.__name__, cupy.asarray(x.astype(dtype)), guarded, word, fmt)
        assert_same("records", guarded[:rows], want)
        assert (guarded[rows:] == 0xA5).all()
        values = cupy.asarray(np.full((rows + 2, channels), 77, np.float32).astype(dtype))
        launch_unpack(unpack.__name__, guarded[:rows], values[:rows], fmt)
        assert_same("values", values[:rows].get(), fmt.decode(want, channels).astype(dtype))
        assert (values[rows:].get().astype(np.float32) == 77).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("fmt", "channels"), FORMATS, ids=lambda p: getattr(p, "name", p))
def test_bad_values_raise_what_the_definition_raises(cupy, fmt, channels, value, dtype):
    from dsv41_kernels.errors import deferred_errors
    from dsv41_kernels.records import pack

    op = ops(fmt)[0]
    x = np.random.default_rng(0).normal(size=(3, 5, channels)).astype(dtype)
    x[1, 2, 37], x[2, 0, 1] = value, np.nan
    with pytest.raises(ValueError) as expected:
        op.definition(x, fmt)
    for version in versions(op.__name__, dtype):
        with pytest.raises(ValueError) as found:
            pack(op.__name__, cupy.asarray(x), fmt, version)
        assert str(found.value) == str(expected.value)
    with pytest.raises(ValueError, match=r"at \(1, 2, 37\)"):
        with deferred_errors():
            op(cupy.asarray(x), fmt)
    assert_same("afterwards", op(cupy.asarray(x[:1]), fmt), op.definition(x[:1], fmt))


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "channels"), FORMATS, ids=lambda p: getattr(p, "name", p))
def test_the_formats_use_the_kernels_for_every_layout(cupy, fmt, channels):
    x = np.random.default_rng(0).normal(size=(6, 2 * channels)).astype(np.float32)
    moved = cupy.asarray(x)
    for view in (np.s_[:, :channels], np.s_[:, ::2], np.s_[::2, channels:]):
        want = fmt.encode(np.ascontiguousarray(x[view]))
        got = fmt.encode(moved[view])
        assert_same("records", got, want)
        assert_same("values", fmt.decode(got, channels), fmt.decode(want, channels))
        assert_same(
            "a slice of records", fmt.decode(got[::2], channels), fmt.decode(want[::2], channels)
        )
    whole = fmt.encode(x[:, :channels])
    for copy in (cupy.asfortranarray(moved[:, :channels]), moved[:, :channels].copy()):
        for _ in range(20):
            assert_same("records, again and again", fmt.encode(copy), whole)
    repeated = cupy.broadcast_to(moved[:1, :channels], (6, channels))
    assert_same("a broadcast row", fmt.encode(repeated), whole[:1].repeat(6, axis=0))
    assert find_kernel(ops(fmt)[0].__name__, "cupy") is not None


@pytest.mark.gpu
def test_records_beyond_two_gigabytes(cupy):
    """A row index times its bytes does not fit into 32 bits."""
    rows = (1 << 31) // 288 + 3
    records = cupy.zeros((rows, 288), np.uint8)
    last = np.random.default_rng(0).normal(size=(2, 512)).astype(np.float32)
    records[-2:] = cupy.asarray(fp4_pack.definition(last, MAIN_KV_FP4))
    got = fp4_unpack(records, 512, MAIN_KV_FP4, BF16)
    assert_same("last rows", got[-2:].get().astype(np.float32), MAIN_KV_FP4.fake(last))
    assert_same("packed again", fp4_pack(got, MAIN_KV_FP4)[-2:], fp4_pack(got[-2:], MAIN_KV_FP4))


def rows_for_norm(rows, channels, dtype):
    rng = np.random.default_rng(channels)
    x = rng.normal(size=(rows, channels)) * np.exp2(rng.integers(-8, 8, (rows, 1)))
    return x.astype(dtype), rng.normal(1, 0.2, channels).astype(np.float32)


def assert_casts_nearly(got, x, weight, eps):
    """Equal to the definition but for single values whose bf16 rounding went the other way."""
    want = rmsnorm_fp8.definition(x, weight, eps, OFFICIAL)
    channels = x.shape[-1]
    assert np.mean(got != want) < 2e-3
    y = rmsnorm(x.astype(np.float32), weight, eps, OFFICIAL).astype(np.float64)
    decoded = ACTIVATION_FP8.decode(got, channels).astype(np.float64)
    amax = np.abs(y).reshape(len(y), -1, 32).max(axis=2).repeat(32, axis=1)
    # half a step of E4M3, of a normal value or of the smallest one, and one step of bf16
    limit = np.abs(y) * (2.0**-4 + 2.0**-7) + amax * 2.0**-16
    assert (np.abs(decoded - y) <= limit).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("channels", [32, 96, 512, 1280, 5120, 16384])
def test_rmsnorm_with_cast(cupy, channels, dtype):
    from dsv41_kernels.rmsnorm_fp8.cupy_op import launch_rmsnorm

    x, weight = rows_for_norm(70, channels, dtype)
    moved, scale = cupy.asarray(x), cupy.asarray(weight)
    found = {}
    for version in ("v1", "v2", "v3", "v4"):
        out = cupy.zeros((70, ACTIVATION_FP8.record_bytes(channels)), np.uint8)
        launch_rmsnorm(moved, scale, out, cupy.zeros(1, np.uint64), 1e-6, version)
        assert_casts_nearly(out.get(), x, weight, 1e-6)
        found[version] = out
    for version in ("v3", "v4"):
        assert_same(f"{version} = v2", found[version], found["v2"])
    whole = rmsnorm_fp8(moved, scale, 1e-6, OFFICIAL)
    assert_same("alone", rmsnorm_fp8(moved[:1], scale, 1e-6, OFFICIAL), whole[:1])
    many = cupy.asarray(np.concatenate([x] * 20))  # so many that blocks take several rows
    for _ in range(100):
        got = rmsnorm_fp8(many, scale, 1e-6, OFFICIAL)
        assert_same(
            "in a batch", got.reshape(20, 70, -1), cupy.broadcast_to(whole, (20, *whole.shape))
        )


@pytest.mark.gpu
def test_rmsnorm_refuses_and_falls_back(cupy):
    x, weight = (cupy.asarray(a) for a in rows_for_norm(3, 64, np.float32))
    x[1, 5] = np.inf
    with pytest.raises(ValueError, match=r"MXFP8 needs finite input, got nan at \(1, 5\)"):
        rmsnorm_fp8(x, weight, 1e-6, OFFICIAL)
    with pytest.raises(ValueError, match=r"weight: expected shape \(64,\), got \(32,\)"):
        rmsnorm_fp8(x, weight[:32], 1e-6, OFFICIAL)
    plain = rmsnorm_fp8(x[:1], weight, 1e-6, FLOAT32)
    assert plain.dtype == np.float32 and plain.shape == (1, 64)
    assert rmsnorm_fp8(x[:0], weight, 1e-6, OFFICIAL).shape == (0, 66)


# ---- without one ----------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "channels"), FORMATS, ids=lambda p: getattr(p, "name", p))
def test_a_wrapper_launches_once_over_all_pieces(fake_cuda, fmt, channels):
    pack, unpack = ops(fmt)
    for dtype in (np.float32, BF16):
        with use("cupy"):
            records = pack(on_device(np.ones((3, 70, channels), dtype)), fmt)
            values = unpack(on_device(records), channels, fmt, dtype)
        assert records.shape == (3, 70, fmt.record_bytes(channels)) and records.dtype == np.uint8
        assert values.shape == (3, 70, channels) and values.dtype == dtype
        (packed, unpacked) = fake_cuda[-2:]
        assert packed[:2] == (
            pack.__name__,
            f"{pack.__name__}_{versions(pack.__name__, dtype)[-1]}",
        )
        assert packed[2] == (-(-210 * channels // 16 // 256),)
        per_thread = 16 // np.dtype(dtype).itemsize
        per_thread *= 2 if unpacked[1] == "fp4_unpack_v3" else 1
        assert unpacked[2] == (-(-210 * channels // per_thread // 256),)
    assert len(fake_cuda) == 4


@pytest.mark.parametrize(("rows", "version", "blocks"), [(396, "v2", 396), (397, "v4", 396)])
def test_rmsnorm_with_cast_takes_several_rows_a_block_where_there_are_many(
    fake_cuda, rows, version, blocks
):
    with use("cupy"):
        x = on_device(np.ones((rows, 512), BF16))
        rmsnorm_fp8(x, on_device(np.ones(512, np.float32)), 1e-6, OFFICIAL)
    assert [launch[:4] for launch in fake_cuda] == [
        ("rmsnorm_fp8", f"rmsnorm_fp8_{version}", (blocks,), (32,))
    ]


def test_rounding_launches_once(fake_cuda):
    with use("cupy"):
        out = ACTIVATION_FP8.fake(on_device(np.ones((3, 96), np.float32)))
        with pytest.raises(ValueError, match="last axis must be a multiple of 32"):
            ACTIVATION_FP8.fake(on_device(np.ones((3, 80), np.float32)))
    assert out.shape == (3, 96) and out.dtype == np.float32
    assert [launch[:3] for launch in fake_cuda] == [("fake_quantize", "fake_quantize_v2", (1,))]


def test_empty_records_launch_nothing(fake_cuda):
    with use("cupy"):
        assert fp4_pack(on_device(np.zeros((0, 512), np.float32)), MAIN_KV_FP4).shape == (0, 288)
        assert fp8_unpack(on_device(np.zeros((0, 528), np.uint8)), 512, WINDOW_KV_FP8).shape == (
            0,
            512,
        )
    assert not fake_cuda


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.zeros((2, 512), np.float32), TypeError, "x: expected a CUDA array, got a numpy"),
        (on_device(np.zeros((2, 512))), TypeError, "x: expected float32 or bfloat16, got float64"),
        (on_device(np.zeros((2, 8), np.float32)), ValueError, "last axis must be a multiple of 16"),
    ],
)
def test_packing_refuses(fake_cuda, x, error, message):
    with use("cupy"), pytest.raises(error, match=message):
        fp4_pack(x, MAIN_KV_FP4)
    assert not fake_cuda


@pytest.mark.parametrize(
    ("records", "dtype", "error", "message"),
    [
        (np.zeros((2, 288), np.uint8), np.float32, TypeError, "records: expected a CUDA array"),
        (on_device(np.zeros((2, 288), np.int8)), np.float32, TypeError, "records: expected uint8"),
        (on_device(np.zeros((2, 287), np.uint8)), np.float32, ValueError, "take 288 bytes, got"),
        (
            on_device(np.zeros((2, 288), np.uint8)),
            np.float64,
            ValueError,
            "dtype: expected float32",
        ),
    ],
)
def test_unpacking_refuses(fake_cuda, records, dtype, error, message):
    with use("cupy"), pytest.raises(error, match=message):
        fp4_unpack(records, 512, MAIN_KV_FP4, dtype)
    assert not fake_cuda


# ---- Numba: in its simulator here, on the device with -m gpu --------------------------------


def pick(x, elements):
    """Evenly spaced rows of x, about so many elements: the simulator is slow."""
    return x[:: max(1, x.size // elements)]


def numba_packs_and_unpacks(move, fmt, channels, dtype, elements):
    pytest.importorskip("numba", reason="needs Numba: pip install numba-cuda")
    pack, unpack = ops(fmt)
    x, records = pick(awkward(channels, dtype), elements), random_records(fmt, channels)
    records = pick(records, elements)
    with use("numba"):
        assert_same("records", pack(move(x), fmt), pack.definition(x, fmt))
    with np.errstate(all="ignore"):
        want = unpack.definition(records, channels, fmt, dtype)
        with use("numba"):
            got = unpack(move(records), channels, fmt, dtype)
    assert_same_values("values", got.get() if hasattr(got, "get") else got, want)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # the largest scales, in both texts
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("fmt", "channels"), FORMATS + OTHERS, ids=lambda p: getattr(p, "name", p))
def test_numba_gives_the_definitions_bits(simulator, fmt, channels, dtype):
    numba_packs_and_unpacks(np.asarray, fmt, channels, dtype, 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("fmt", "channels"), FORMATS + OTHERS, ids=lambda p: getattr(p, "name", p))
def test_numba_on_the_device_gives_the_definitions_bits(cupy, fmt, channels, dtype):
    numba_packs_and_unpacks(cupy.asarray, fmt, channels, dtype, 1 << 30)


@pytest.fixture
def simulator():
    numba = pytest.importorskip("numba", reason="needs Numba: pip install numba-cuda")
    if not numba.config.ENABLE_CUDASIM:
        pytest.skip("a CUDA driver is here: the kernels themselves run under `make test-gpu`")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the simulator goes on with bad values
@pytest.mark.parametrize(("fmt", "channels"), FORMATS, ids=lambda p: getattr(p, "name", p))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numba_reports_the_first_bad_element(simulator, fmt, channels, value):
    pack = ops(fmt)[0]
    x = np.random.default_rng(0).normal(size=(2, 2, channels)).astype(np.float32)
    x[0, 1, 37], x[1, 0, 1] = value, np.nan
    with pytest.raises(ValueError) as expected:
        pack.definition(x, fmt)
    with use("numba"), pytest.raises(ValueError) as found:
        pack(x, fmt)
    assert str(found.value) == str(expected.value)


def test_numba_refuses_other_types(simulator):
    with use("numba"):
        with pytest.raises(TypeError, match="x: expected float32 or bfloat16, got float64"):
            fp4_pack(np.zeros((2, 512)), MAIN_KV_FP4)
        with pytest.raises(ValueError, match="take 288 bytes, got shape"):
            fp4_unpack(np.zeros((2, 287), np.uint8), 512, MAIN_KV_FP4)
        assert fp4_pack(np.zeros((0, 512), np.float32), MAIN_KV_FP4).shape == (0, 288)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("channels", [32, 96, 512])
def test_numba_rmsnorm_with_cast(simulator, channels, dtype):
    x, weight = rows_for_norm(4, channels, dtype)
    with use("numba"):
        whole = rmsnorm_fp8(x, weight, 1e-6, OFFICIAL)
        assert_same("alone", rmsnorm_fp8(x[1:2], weight, 1e-6, OFFICIAL), whole[1:2])
    assert_casts_nearly(whole, x, weight, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [32, 96, 5120])
def test_numba_rmsnorm_with_cast_on_the_device(cupy, channels):
    pytest.importorskip("numba", reason="needs Numba: pip install numba-cuda")
    for dtype in (np.float32, BF16):
        x, weight = rows_for_norm(70, channels, dtype)
        with use("numba"):
            got = rmsnorm_fp8(cupy.asarray(x), cupy.asarray(weight), 1e-6, OFFICIAL)
            many = cupy.asarray(np.concatenate([x] * 20))  # blocks take several rows
            batch = rmsnorm_fp8(many, cupy.asarray(weight), 1e-6, OFFICIAL)
        assert_casts_nearly(got.get(), x, weight, 1e-6)
        assert_same("in a batch", batch[-70:], got)


def test_numba_kernels_compile_for_hopper_in_registers_and_single_precision():
    """In a process of its own: the simulator, once chosen, compiles nothing."""
    pytest.importorskip("numba", reason="needs Numba: pip install numba-cuda")
    root = Path(__file__).parent.parent
    found = subprocess.run(
        [sys.executable, str(root / "tests" / "numba_ptx.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": f"{root}:{root / 'kernels'}"},
    )
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == 14 and all(line.endswith(": fine") for line in lines), found.stdout
