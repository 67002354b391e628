"""Attention kernels, forward and backward: checks on any machine, numbers on a GPU."""

import numpy as np
import pytest
from compare import assert_close, assert_same
from dsv41_kernels.sparse_attn.oracle import attention
from fake_cuda import FakeArray, on_device
from test_sparse_attn import rows_with

from dsv41.dispatch import find_kernel
from dsv41.quant import FLOAT, FLOAT32, OFFICIAL
from dsv41.sparse_attn import rope_sparse_attn, sparse_attn
from dsv41.train.sparse_attn import rope_sparse_attn_backward, sparse_attn_backward

BF16 = OFFICIAL.but(main_kv=FLOAT, window_kv=FLOAT)
NUMERICS = {"float32": FLOAT32, "bf16": BF16, "official": OFFICIAL}
COUNTS = [0, 1, 63, 64, 65, 512]
SINKS = np.float32([-np.inf, 0, 20])
FREQS = np.float32(10_000.0 ** -np.linspace(0, 1, 8))


def inputs(numerics=FLOAT32, heads=8, channels=64, near=(64, 0, 1), far=(65, 3, 0), records=600):
    """q, then the other arguments of sparse_attn as NumPy arrays; rows nobody reads hold NaN."""
    rng = np.random.default_rng(heads)
    q = 2 * rng.standard_normal((len(near), heads, channels), np.float32)
    values = rng.standard_normal((2, records, channels), np.float32)
    rows = [rows_with(c, max(c) + 1, records - 1, seed) for seed, c in enumerate((near, far))]
    window, pool = numerics.window_kv.encode(values[0]), numerics.main_kv.encode(values[1])
    window[-1], pool[-1] = (np.nan if x.dtype == np.float32 else 255 for x in (window, pool))
    sink = np.resize(SINKS, heads)
    return q, window, rows[0], pool, rows[1], sink, numerics


def moved(cupy, arguments):
    return [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in arguments]


def faked(arguments):
    return [on_device(a) if isinstance(a, np.ndarray) else a for a in arguments]


# ---- checks, without a GPU ------------------------------------------------------------------

WRONG = {
    "window on the host": (1, lambda x: np.array(x), TypeError, "window: expected a CUDA array"),
    "window of doubles": (1, lambda x: x.astype(np.float64), TypeError, "window: expected float32"),
    "a narrow window": (1, lambda x: x[:, :-4], ValueError, "window: expected records of 64"),
    "rows of another batch": (2, lambda x: x[:-1], ValueError, "window_rows: expected 3 rows"),
    "float rows": (2, lambda x: x.astype(np.float32), TypeError, "window_rows: expected int64"),
    "bytes as records": (3, lambda x: x.view(np.uint8), TypeError, "global_kv: expected float32"),
    "rows of bool": (4, lambda x: x > 0, TypeError, "global_rows: expected int64 or int32"),
    "one sink": (5, lambda x: x[:1], ValueError, "sink: expected shape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_named(fake_cuda, case):
    place, spoil, error, message = WRONG[case]
    arguments = faked(inputs())
    arguments[place] = spoil(arguments[place])
    for op, first in (("sparse_attn", []), ("sparse_attn_backward", [arguments[0]])):
        with pytest.raises(error, match=message):
            find_kernel(op, "cupy")(*first, *arguments)
    assert not fake_cuda


def test_records_of_another_format_are_named(fake_cuda):
    arguments = faked(inputs(OFFICIAL))
    arguments[3] = arguments[3][:, :-1]
    with pytest.raises(ValueError, match=r"global_kv: expected records of 36, got \(600, 35\)"):
        find_kernel("sparse_attn", "cupy")(*arguments)


def test_frequencies_that_do_not_fit_are_named(fake_cuda):
    q, *reads = faked(inputs())
    positions = on_device(np.arange(len(q)))
    with pytest.raises(ValueError, match="freqs: 33 pairs do not fit into 64 channels"):
        find_kernel("rope_sparse_attn", "cupy")(q, positions, np.ones(33, np.float32), *reads)


def test_no_queries_no_launch(fake_cuda):
    arguments = faked(inputs())
    for place in (0, 2, 4):
        arguments[place] = arguments[place][:0]
    assert find_kernel("sparse_attn", "cupy")(*arguments).shape == (0, 8, 64)
    dq, dwindow, dglobal, dsink, share = find_kernel("sparse_attn_backward", "cupy")(
        arguments[0], *arguments
    )
    assert dq.shape == (0, 8, 64) and share.shape == (0, 66)
    assert not dwindow.any() and not dglobal.any() and not dsink.any()
    assert not fake_cuda


def test_one_launch_forward_four_backward(fake_cuda):
    arguments = faked(inputs())
    find_kernel("sparse_attn", "cupy")(*arguments)
    find_kernel("sparse_attn_backward", "cupy")(arguments[0], *arguments)
    names = [name for _, name, *_ in fake_cuda]
    assert names == ["attend", "count_readers", "places", "attend_backward", "add_parts"]
    blocks = [grid[0] for _, _, grid, *_ in fake_cuda]
    assert blocks == [3, -(-3 * 131 // 256), 1, 3, 8 + 2 * 600]


@pytest.mark.parametrize("heads, channels", [(3, 64), (32, 64), (64, 512)])
def test_many_heads_go_to_the_plain_kernel_and_have_no_backward(fake_cuda, heads, channels):
    arguments = inputs(heads=heads, channels=channels)
    fake = faked(arguments)
    find_kernel("sparse_attn", "cupy")(*fake)
    assert [launch[1:3] for launch in fake_cuda] == [("plain", (3 * heads,))]
    got = find_kernel("sparse_attn_backward", "cupy")(fake[0], *fake)
    want = sparse_attn_backward.definition(arguments[0], *arguments)
    assert_same("dq", np.asarray(got[0]), want[0])
    assert "sparse_attn_backward" not in {op for op, *_ in fake_cuda}


def test_other_channels_are_left_to_the_definition(fake_cuda):
    arguments = inputs(channels=48)
    got = find_kernel("sparse_attn", "cupy")(*faked(arguments))
    assert_same("o", np.asarray(got), sparse_attn.definition(*arguments))
    assert not fake_cuda


def test_strided_and_misaligned_arrays_are_copied(fake_cuda):
    arguments = faked(inputs())
    wide = on_device(np.zeros((600, 65), np.float32))
    arguments[1] = wide[:, 1:]
    find_kernel("sparse_attn", "cupy")(*arguments)
    pointers = [a.data.ptr for a in fake_cuda[0][4] if isinstance(a, FakeArray)]
    assert all(p % 16 == 0 for p in pointers[:4]) and wide[:, 1:].data.ptr not in pointers


# ---- numbers, on a GPU ----------------------------------------------------------------------

FEW = [(4, 64), (8, 64), (16, 128), (8, 32), (8, 256)]
MANY = [(3, 64), (64, 32), (5, 512)]


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("heads, channels", FEW + MANY)
def test_forward_equals_float64(cupy, numerics, heads, channels):
    numerics = NUMERICS[numerics]
    arguments = inputs(numerics, heads, channels, [c % 100 for c in COUNTS], [0, 1, 63, 64, 65, 9])
    q, window, near_rows, pool, far_rows, sink, _ = arguments
    near, far = numerics.window_kv.decode(window, channels), numerics.main_kv.decode(pool, channels)
    positions = np.arange(len(q)) * 1001
    rel = 4e-3 if numerics.bf16 else 1e-5
    got = sparse_attn(*moved(cupy, arguments))
    want = attention(q, near, near_rows, far, far_rows, sink)
    assert_close("o", got.get(), want, rel=rel)
    got = rope_sparse_attn(*moved(cupy, (q, positions)), FREQS, *moved(cupy, arguments[1:]))
    want = attention(q, near, near_rows, far, far_rows, sink, positions, FREQS)
    assert_close("o of turned queries", got.get(), want, rel=2 * rel)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [3, 8])
@pytest.mark.parametrize("width", [1, 63, 64, 65, 640])
def test_every_count_of_rows(cupy, width, heads):
    counts = [c for c in COUNTS if c <= width]
    arguments = inputs(heads=heads, near=counts, far=[0] * len(counts))
    arguments = (*arguments[:2], rows_with(counts, width, 599), *arguments[3:])
    q, near, near_rows, far, far_rows, sink, _ = arguments
    want = attention(q, near, near_rows, far, far_rows, sink)
    got = sparse_attn(*moved(cupy, arguments)).get()
    assert_close("o", got, want)
    assert not got[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("heads, channels", FEW)
def test_backward_equals_float64(cupy, numerics, heads, channels):
    q, *reads, sink, numerics = inputs(NUMERICS[numerics], heads, channels)
    sink = np.where(np.isinf(sink), np.float32(-3), sink)  # a query without rows needs a sink
    do = np.random.default_rng(9).standard_normal(q.shape, np.float32)
    positions = np.arange(len(q)) * 1001
    got = sparse_attn_backward(*moved(cupy, (do, q, *reads, sink)), numerics)
    turned = rope_sparse_attn_backward(
        *moved(cupy, (do, q, positions)), FREQS, *moved(cupy, (*reads, sink)), numerics
    )
    do, q, sink = (x.astype(np.float64) for x in (do, q, sink))
    want = sparse_attn_backward.definition(do, q, *reads, sink, numerics)
    for name, g, w in zip(("dq", "dwindow", "dglobal", "dsink", "share"), got, want, strict=True):
        assert_close(name, g.get(), w)
    if not numerics.bf16:  # there q is rounded after its rotation, in float32
        want = rope_sparse_attn_backward.definition(do, q, positions, FREQS, *reads, sink, numerics)
        for name, g, w in zip(("dq", "dwindow", "dglobal"), turned, want, strict=False):
            assert_close(f"{name}, turned", g.get(), w, rel=1e-5)


@pytest.mark.gpu
def test_many_readers_of_one_record_and_blocks_of_queries(cupy, monkeypatch):
    rng = np.random.default_rng(0)
    do, q = rng.standard_normal((2, 3000, 8, 64), np.float32)
    kv = rng.standard_normal((40, 64), np.float32)
    near, far = rng.integers(-1, 40, (3000, 20)), rng.integers(-1, 3, (3000, 7))
    arguments = do, q, kv, near, kv, far, np.resize(SINKS[1:], 8)
    want = sparse_attn_backward.definition(*(a.astype(np.float64) for a in arguments[:2]),
                                           *arguments[2:], FLOAT32)  # fmt: skip
    for block in (1 << 28, 1000 * 27 * 64):
        monkeypatch.setattr(
            "dsv41_kernels.sparse_attn_backward.cupy_op.block_elements", lambda q, b=block: b
        )
        got = sparse_attn_backward(*moved(cupy, arguments), FLOAT32)
        for name, g, w in zip(("dq", "dwindow", "dglobal", "dsink"), got, want, strict=False):
            assert_close(name, g.get(), w)


@pytest.mark.gpu
def test_bits_repeat_and_do_not_depend_on_the_batch(cupy):
    q, *reads, sink, _ = moved(cupy, inputs(near=[64] * 500, far=[65] * 500))
    do = cupy.asarray(np.random.default_rng(1).standard_normal(q.shape, np.float32))
    first = sparse_attn(q, *reads, sink, FLOAT32).get()
    grads = [g.get() for g in sparse_attn_backward(do, q, *reads, sink, FLOAT32)]
    for _ in range(100):
        assert_same("o", sparse_attn(q, *reads, sink, FLOAT32).get(), first)
        for g, before in zip(
            sparse_attn_backward(do, q, *reads, sink, FLOAT32), grads, strict=True
        ):
            assert_same("gradient", g.get(), before)
    window, near, pool, far = reads
    alone = sparse_attn(q[7:8], window, near[7:8], pool, far[7:8], sink, FLOAT32)
    assert_same("row 7 alone", alone.get()[0], first[7])


@pytest.mark.gpu
def test_a_row_past_the_end_is_named_and_gives_nan_to_its_query_only(cupy):
    from dsv41_kernels.errors import deferred_errors

    arguments = moved(cupy, inputs())
    want = sparse_attn(*arguments).get()
    arguments[4][1, 2] = 600
    message = r"global_rows: row 600 of 600 records at \(1, 2\)"
    with pytest.raises(ValueError, match=message):
        sparse_attn(*arguments)
    with pytest.raises(ValueError, match=message):
        sparse_attn_backward(arguments[0], *arguments)
    with pytest.raises(ValueError, match=message), deferred_errors():
        got = sparse_attn(*arguments).get()
    assert np.isnan(got[1]).all()
    assert_same("others", got[[0, 2]], want[[0, 2]])
