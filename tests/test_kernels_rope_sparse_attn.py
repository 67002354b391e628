"""Attention of the released model's size: stored records, 64 heads of 512 channels."""

import sys

import numpy as np
import pytest
from compare import assert_close, assert_same
from dsv41_kernels import launch, nvrtc
from dsv41_kernels.sparse_attn.oracle import attention
from test_kernels_sparse_attn import COUNTS, faked, moved
from test_sparse_attn import rows_with

from dsv41.dispatch import find_kernel
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.sparse_attn import rope_sparse_attn

FREQS = np.float32(10_000.0 ** -np.linspace(0, 1, 32))
WIDTHS = [(1, 0), (63, 1), (65, 65), (128, 512), (0, 70)]
SINKS = np.resize(np.float32([-np.inf, 0, 20, 0.5]), 64)


def inputs(near=(128, 0, 1), far=(512, 3, 0), records=600, widths=(128, 512)):
    """Arguments of rope_sparse_attn up to the sink; the last record of either pool is all NaN."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((len(near), 64, 512), np.float32)
    values = rng.standard_normal((2, records, 512), np.float32)
    window, pool = OFFICIAL.window_kv.encode(values[0]), OFFICIAL.main_kv.encode(values[1])
    window[-1] = pool[-1] = 255
    rows = [rows_with(c, w, records - 1, w) for c, w in zip((near, far), widths, strict=True)]
    positions = np.arange(len(near)) * 100_003
    return q, positions, FREQS, window, rows[0], pool, rows[1], SINKS


def few_rows(near, far):
    """Two queries, one with these many rows of each kind and one with half of them."""
    return inputs(near=[near, near // 2], far=[far, far // 2], widths=(near, far))


def exact(q, positions, freqs, window, near_rows, pool, far_rows, sink):
    """The same in float64 over the decoded records."""
    near, far = OFFICIAL.window_kv.decode(window, 512), OFFICIAL.main_kv.decode(pool, 512)
    return attention(q, near, near_rows, far, far_rows, sink, positions, freqs)


# ---- without a GPU --------------------------------------------------------------------------


def test_warpgroup_products_run_unhindered():
    """Results that are touched too early make the compiler wait after every product, and say so."""
    if not nvrtc.available():
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    builds = [b for b in launch.builds("rope_sparse_attn") if "HEADS" not in b[1]]
    assert len(builds) == 5
    for arch, macros in builds:
        options = (*launch.options(arch, macros), f"-arch={arch}")
        log = nvrtc.compile_source(launch.source("rope_sparse_attn"), options)
        assert "serialized" not in log and "injected" not in log, macros
        # what groups of v6 to v8 hand to each other adds up to this, or they would wait for ever
        started_with = {k.name: k.registers for k in nvrtc.read_log(log)}["relay"]
        assert started_with == (128 if macros.get("SPLIT") == "4" else 168)
        others = [k.registers for k in nvrtc.read_log(log) if k.name in ("resident", "quad")]
        assert others == ([] if "SPLIT" in macros else [128, 128])


@pytest.mark.parametrize("tokens, blocks", [(1, 4), (65, 260), (66, 66), (100, 100)])
def test_v3_spreads_heads_while_tokens_are_few(fake_cuda, monkeypatch, tokens, blocks):
    arguments = inputs(near=[1] * tokens, far=[2] * tokens)
    find_kernel("rope_sparse_attn", "cupy")
    module = sys.modules["dsv41_kernels.rope_sparse_attn.cupy_op"]
    monkeypatch.setattr(module, "processors", lambda: 132)
    module.tiles(*faked(arguments), OFFICIAL)
    assert [one[1:4] for one in fake_cuda] == [("tiles", (blocks,), (256,))]


@pytest.mark.parametrize(
    "tokens, width, launched",
    [
        (1, 512, ("cluster", (64,), (544,))),
        (3, 640, ("cluster", (192,), (544,))),
        (4, 640, ("quad", (16,), (512,))),
        (4, 641, ("relay", (16,), (512,))),
        (30, 512, ("quad", (120,), (512,))),
        (31, 512, ("relay", (124,), (512,))),
        (33, 512, ("relay", (132,), (512,))),
        (34, 512, ("quad", (68,), (512,))),
        (66, 640, ("quad", (132,), (512,))),
        (66, 641, ("relay", (132,), (384,))),
        (67, 512, ("resident", (67,), (512,))),
        (67, 641, ("resident", (67,), (512,))),
        (300, 512, ("resident", (132,), (512,))),
        (1, 2000, ("pipeline", (1,), (384,))),
    ],
)
def test_few_tokens_are_spread(fake_cuda, monkeypatch, tokens, width, launched):
    find_kernel("rope_sparse_attn", "cupy")
    module = sys.modules["dsv41_kernels.rope_sparse_attn.cupy_op"]
    monkeypatch.setattr(module, "processors", lambda: 132)
    arguments = faked(inputs(near=[1] * tokens, far=[2] * tokens, widths=(128, width)))
    module.rope_sparse_attn(*arguments, OFFICIAL)
    assert [one[1:4] for one in fake_cuda] == [launched]


def test_no_tokens_no_launch(fake_cuda, monkeypatch):
    find_kernel("rope_sparse_attn", "cupy")
    module = sys.modules["dsv41_kernels.rope_sparse_attn.cupy_op"]
    monkeypatch.setattr(module, "processors", lambda: 132)
    for version in (module.pipeline, module.cluster, module.relay, module.resident, module.quad):
        assert version(*faked(inputs(near=[], far=[])), OFFICIAL).shape == (0, 64, 512)
    assert not fake_cuda


@pytest.mark.parametrize(
    "place, name, spoil",
    [
        (0, "q", lambda q: np.array(q)),
        (1, "positions", lambda p: p[:-1]),
        (3, "window", lambda w: w[:, :-1]),
        (4, "window_rows", lambda r: r.astype(np.float64)),
        (5, "global_kv", lambda p: p.astype(np.int32)),
        (6, "global_rows", lambda r: r[:-1]),
        (7, "sink", lambda s: s[:1]),
    ],
)
def test_a_wrong_argument_is_named(fake_cuda, monkeypatch, place, name, spoil):
    find_kernel("rope_sparse_attn", "cupy")
    module = sys.modules["dsv41_kernels.rope_sparse_attn.cupy_op"]
    monkeypatch.setattr(module, "processors", lambda: 132)
    arguments = faked(inputs())
    arguments[place] = spoil(arguments[place])
    with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
        module.rope_sparse_attn(*arguments, OFFICIAL)
    assert not fake_cuda


def test_float32_numerics_go_to_the_plain_kernel(fake_cuda):
    q, positions, freqs, window, near, pool, far, sink = inputs()
    window, pool = (np.zeros((600, 512), np.float32) for _ in range(2))
    arguments = q, positions, freqs, window, near, pool, far, sink
    find_kernel("rope_sparse_attn", "cupy")(*faked(arguments), FLOAT32)
    assert [one[1:3] for one in fake_cuda] == [("plain", (3 * 64,))]


@pytest.mark.parametrize("widths", WIDTHS)
def test_arithmetic_without_the_rounding_points_is_told_apart(widths):
    """What makes the bound of the same test on a GPU mean something."""
    arguments = few_rows(*widths)
    want = rope_sparse_attn.definition(*arguments, OFFICIAL)
    unrounded = OFFICIAL.store(np.float32(exact(*arguments)))
    assert np.mean(unrounded != want) > 4e-2


# ---- on a GPU -------------------------------------------------------------------------------


def versions():
    """Every version as a function of the arguments of rope_sparse_attn."""
    from dsv41_kernels.rope_sparse_attn.cupy_op import (
        cluster,
        pipeline,
        quad,
        relay,
        resident,
        tiles,
    )
    from dsv41_kernels.sparse_attn.cupy_op import plain

    return {
        "v1": plain,
        "v3, 64 heads a block": lambda *a: tiles(*a, heads=64),
        "v3, 16 heads a block": lambda *a: tiles(*a, heads=16),
        "v4": pipeline,
        "v5, 8 blocks add values": lambda *a: cluster(*a, adders=8),
        "v5, 16 blocks add values": lambda *a: cluster(*a, adders=16),
        "v6": lambda *a: relay(*a, split=1),
        "v6, 2 blocks a token": lambda *a: relay(*a, split=2),
        "v6, 4 blocks a token": lambda *a: relay(*a, split=4),
        "v7": resident,
        "v8, 4 blocks a token": lambda *a: quad(*a, sharers=4),
        "v8, 2 blocks a token": lambda *a: quad(*a, sharers=2),
    }


def assert_attention(name, got, want):
    """As far from float64 as one rounding of p and two of o to bf16 bring it."""
    assert_close(name, got, want, rel=4e-3)
    got, want = got.astype(np.float64).ravel(), want.ravel()
    cosine = got @ want / np.sqrt((got @ got) * (want @ want))
    assert 1 - cosine < 1e-5, f"{name}: cosine distance {1 - cosine:.2g}"


@pytest.mark.gpu
@pytest.mark.parametrize("near", [0, 1, 127, 128])
def test_every_version_equals_float64(cupy, near):
    arguments = inputs(near=[near] * len(COUNTS), far=COUNTS)
    want = exact(*arguments)
    for name, version in versions().items():
        got = version(*moved(cupy, arguments), OFFICIAL).get()
        assert_attention(name, got, want)
        assert near or not got[0].any(), f"{name}: a query without records gives 0"


@pytest.mark.gpu
@pytest.mark.parametrize("widths", WIDTHS)
def test_every_version_rounds_where_the_definition_does(cupy, widths):
    """An exponential that is off by one part in a million moves one of 300 outputs by a step of
    bf16, since a weight near a tie flips; a rounding point left out moves one of 20 at least.
    """
    arguments = few_rows(*widths)
    want = rope_sparse_attn.definition(*arguments, OFFICIAL)
    for name, version in versions().items():
        got = version(*moved(cupy, arguments), OFFICIAL).get()
        assert np.mean(got != want) < 1e-2, f"{name}: {np.mean(got != want):.2g} differ"
        step = np.abs(got - want).max() / np.abs(want).max()
        assert step < 2**-7, f"{name}: more than a rounding apart, {step:.2g} of the largest value"


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_batch_or_on_the_run(cupy):
    arguments = moved(cupy, inputs(near=[128] * 200, far=[512] * 200))
    first = rope_sparse_attn(*arguments, OFFICIAL).get()
    for _ in range(100):
        assert_same("again", rope_sparse_attn(*arguments, OFFICIAL).get(), first)
    for count in (1, 3, 20, 32, 65):
        few = list(arguments)
        for place in (0, 1, 4, 6):
            few[place] = arguments[place][7 : 7 + count]
        assert_same(f"{count} of 200", rope_sparse_attn(*few, OFFICIAL).get(), first[7 : 7 + count])


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(3, 0), (64, 64), (65, 100), (128, 512), (128, 640)])
def test_v4_and_later_versions_have_the_same_bits(cupy, widths):
    """Calls of few and of many tokens take different versions; a token must not notice."""
    near, far = widths
    arguments = moved(cupy, inputs((near, 0, near // 2), (far, far // 3, 0), 700, widths))
    v4 = versions()["v4"](*arguments, OFFICIAL).get()
    for name, version in versions().items():
        if name[:2] in ("v5", "v6", "v7", "v8"):
            assert_same(name, version(*arguments, OFFICIAL).get(), v4)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(128, 0), (128, 1), (65, 130), (128, 512), (130, 520)])
def test_a_block_that_takes_many_tokens_mixes_none_of_them(cupy, widths):
    rng = np.random.default_rng(1)
    near, far = (rng.integers(0, w + 1, 700) for w in widths)
    arguments = moved(cupy, inputs(near, far, 700, widths))
    want = versions()["v4"](*arguments, OFFICIAL).get()
    assert_same("v7", versions()["v7"](*arguments, OFFICIAL).get(), want)


@pytest.mark.gpu
def test_every_code_and_scale_of_both_formats_is_read_exactly(cupy):
    """One record a query and no sink: o is that record, rounded to bf16, with nothing to turn."""
    finite = np.array([c for c in range(256) if c % 128 != 127], np.uint8)
    window = np.resize(np.repeat(finite, 2), (128, 528)).astype(np.uint8)
    window[:, :512] = np.resize(finite, 128 * 512).reshape(128, 512)
    window[:, 512:] = (np.arange(128 * 16) % 143).reshape(128, 16)
    pool = np.random.default_rng(0).integers(0, 256, (128, 288), np.uint8)
    pool[:, 256:] = np.resize(finite, 128 * 32).reshape(128, 32)
    q, sink = np.zeros((256, 64, 512), np.float32), np.full(64, -np.inf, np.float32)
    one = np.concatenate([np.arange(128), np.full(128, -1)])[:, None]
    arguments = q, np.arange(256), FREQS[:0], window, one, pool, one[::-1].copy(), sink
    want = np.concatenate(
        [OFFICIAL.window_kv.decode(window, 512), OFFICIAL.main_kv.decode(pool, 512)[::-1]]
    )
    want = OFFICIAL.store(np.where(np.abs(want) < 2.0**-110, 0, want))
    for name, version in versions().items():
        got = version(*moved(cupy, arguments), OFFICIAL).get()
        got = np.where(np.abs(got) < 2.0**-110, 0, got)
        assert_same(name, got[:, 0] + 0, want + 0)
        assert_same(name, got[:, 63] + 0, want + 0)


@pytest.mark.gpu
def test_a_row_past_the_end_is_named_and_gives_nan_to_its_query_only(cupy):
    from dsv41_kernels.errors import deferred_errors

    arguments = moved(cupy, inputs())
    arguments[4][1, 5] = 600
    message = r"window_rows: row 600 of 600 records at \(1, 5\)"
    for name, version in versions().items():
        with pytest.raises(ValueError, match=message), deferred_errors():
            got = version(*arguments, OFFICIAL).get()
        assert np.isnan(got[1]).all(), name
        assert not np.isnan(got[[0, 2]]).any(), name


@pytest.mark.gpu
def test_records_beyond_two_gigabytes(cupy):
    q, positions, freqs, window, near, pool, far, sink = inputs()
    many = (1 << 31) // 288 + 1000
    large = cupy.zeros((many, 288), cupy.uint8)
    large[-600:] = cupy.asarray(pool)
    far_away = np.where(far < 0, -1, far + many - 600)
    head, tail = moved(cupy, (q, positions, freqs, window, near)), cupy.asarray(sink)
    want = rope_sparse_attn(*head, *moved(cupy, (pool, far)), tail, OFFICIAL).get()
    got = rope_sparse_attn(*head, large, cupy.asarray(far_away), tail, OFFICIAL).get()
    assert_same("o", got, want)
