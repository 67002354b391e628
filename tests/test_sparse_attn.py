"""Attention over listed rows: hand-made softmaxes, a float64 loop, chunk rounding, empty rows."""

import importlib
import math
import tracemalloc

import numpy as np
import pytest
from compare import assert_any_layout, assert_close, assert_same, repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41.formats import round_bf16
from dsv41.quant import FLOAT, FLOAT32, OFFICIAL
from dsv41.rope import rotate
from dsv41.sparse_attn import rope_sparse_attn, sparse_attn

INVARIANT = FLOAT32.but(batch_invariant=True)
BF16 = OFFICIAL.but(main_kv=FLOAT, window_kv=FLOAT)  # rounds p and o, reads records as they are
NO_SINK = -np.inf


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attend(q, window, window_rows, sink, numerics=FLOAT32, global_kv=None, global_rows=None):
    """sparse_attn on lists; a layer without global KV unless it is given."""
    window = np.asarray(window, np.float32)
    global_kv = window[:0] if global_kv is None else np.asarray(global_kv, np.float32)
    window_rows = np.asarray(window_rows, np.int64)
    if global_rows is None:
        global_rows = np.zeros((len(window_rows), 0))
    global_rows = np.asarray(global_rows, np.int64)
    q, sink = np.asarray(q, np.float32), np.asarray(sink, np.float32)
    return sparse_attn(q, window, window_rows, global_kv, global_rows, sink, numerics)


def slow_attn(q, near, near_rows, far, far_rows, sink):
    """Float64, one query and head at a time; near and far are decoded records."""
    out = np.zeros(q.shape)
    for t, h in np.ndindex(*q.shape[:2]):
        keys = [near[r] for r in near_rows[t] if r >= 0] + [far[r] for r in far_rows[t] if r >= 0]
        if not keys:
            continue
        keys = np.array(keys, np.float64)
        s = keys @ q[t, h].astype(np.float64) / math.sqrt(q.shape[2])
        top = max(s.max(), sink[h])
        p = np.exp(s - top)
        out[t, h] = p @ keys / (p.sum() + math.exp(sink[h] - top))
    return out


def rows_with(counts, width, records, seed=0):
    """For each count that many distinct rows of `records`, at random columns of `width`."""
    rng = np.random.default_rng(seed)
    rows = np.full((len(counts), width), -1)
    for t, count in enumerate(counts):
        columns = rng.choice(width, count, replace=False)
        rows[t, columns] = rng.choice(records, count, replace=False)
    return rows


# ---- by hand --------------------------------------------------------------------------------


def test_window_global_rows_and_sink_share_one_softmax():
    # channel 0 makes the scores 0, 0, ln 2 (times 2 for the scale 1/2), channel 1 holds the values
    window, far = [[0, 1, 0, 0], [0, 2, 0, 0]], [[math.log(2), 10, 0, 0]]
    o = attend([[[2, 0, 0, 0]]], window, [[0, 1]], [math.log(3)], FLOAT32, far, [[0]])
    assert_close("with sink", o[0, 0, 1], 23 / 7, rel=1e-6)
    o = attend([[[2, 0, 0, 0]]], window, [[0, 1]], [NO_SINK], FLOAT32, far, [[0]])
    assert_close("without", o[0, 0, 1], 5.75, rel=1e-6)


def test_the_sink_belongs_to_its_head_and_is_not_scaled():
    q = np.zeros((1, 3, 4))
    o = attend(q, [[1, 1, 1, 1]], [[0]], [NO_SINK, 0, math.log(3)])
    assert_close("shares", o[0, :, 0], [1, 1 / 2, 1 / 4], rel=1e-6)


def test_an_empty_place_is_not_the_last_row():
    records = [[1, 0], [0, 1], [100, 100]]
    q, rows = np.zeros((1, 1, 2)), [[0, -1, -1, -1]]
    assert_close("window", attend(q, records, rows, [NO_SINK]), [[[1, 0]]])
    none = np.zeros((1, 0))
    o = attend(q, records, none, [NO_SINK], FLOAT32, records, rows)
    assert_close("global", o, [[[1, 0]]])


@pytest.mark.parametrize("empty", [16, 63, 64, 65, 128])
def test_leading_empty_places_do_not_disturb_the_only_row(empty):
    o = attend(np.ones((1, 2, 4)), np.eye(4), [[-1] * empty + [2]], [NO_SINK, NO_SINK])
    assert_same("value", o, np.float32([[[0, 0, 1, 0]] * 2]))


@pytest.mark.parametrize("numerics", [FLOAT32, BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize("sink", [NO_SINK, 0.0, 0.7, 20.0, -1000.0])
def test_a_query_without_rows_gives_exactly_zero(sink, numerics):
    o = attend(np.ones((1, 2, 4)), np.eye(4), [[-1] * 5], [sink, sink], numerics)
    assert_same("zero", o, np.zeros((1, 2, 4), np.float32))


def test_no_lists_at_all_give_zero():
    o = attend(np.ones((2, 3, 4)), np.zeros((0, 4)), np.zeros((2, 0)), [0, 0, NO_SINK])
    assert_same("zero", o, np.zeros((2, 3, 4), np.float32))


def test_a_row_listed_twice_counts_twice():
    # a token may be met through the window and through its compressed entry
    q, records = np.zeros((1, 1, 2)), [[1, 0], [0, 1]]
    assert_close("both", attend(q, records, [[0, 1, 0]], [NO_SINK]), [[[2 / 3, 1 / 3]]])
    o = attend(q, records, [[0, 1]], [NO_SINK], FLOAT32, records, [[0]])
    assert_close("once in each list", o, [[[2 / 3, 1 / 3]]])


def test_large_scores_do_not_overflow():
    o = attend([[[1e4, 0]]], [[1e4, 1], [-1e4, 2], [1e4, 3]], [[1, 0, 2]], [0.0])
    assert_close("mean of the two largest", o, [[[1e4, 2]]])


# ---- against the loop -----------------------------------------------------------------------

COUNTS = [0, 1, 63, 64, 65, 512]


@pytest.mark.parametrize("sink", [NO_SINK, 0.0, 20.0])
@pytest.mark.parametrize("heads", [1, 3])
def test_float32_equals_a_float64_loop(heads, sink):
    near, far = random(200, 16), random(600, 16, seed=1)
    q = 2 * random(len(COUNTS), heads, 16, seed=2)
    near_rows = rows_with([min(c, 65) for c in COUNTS[::-1]], 128, 200)
    far_rows = rows_with(COUNTS, 512, 600)
    sinks = np.full(heads, sink) + 0.1 * np.arange(heads)
    o = attend(q, near, near_rows, sinks, FLOAT32, far, far_rows)
    assert o.dtype == np.float32
    assert_close("o", o, slow_attn(q, near, near_rows, far, far_rows, sinks))


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_any_width_of_the_window_list(width, tokens):
    records, q, sink = random(130, 8), random(tokens, 2, 8, seed=1), random(2, seed=2)
    rows = rows_with([width, 0, width // 2, 1, width][:tokens], width, 130)
    none = np.zeros((tokens, 0), int)
    o = attend(q, records, rows, sink)
    assert o.shape == (tokens, 2, 8) and o.dtype == np.float32
    assert_close("o", o, slow_attn(q, records, rows, records[:0], none, sink))


def test_official_reads_bytes_of_both_caches():
    near, far = random(40, 64), random(50, 64, seed=1)
    q, sink = 2 * random(3, 2, 64, seed=2), np.float32([0, NO_SINK])
    near_rows, far_rows = rows_with([9, 0, 30], 33, 40), rows_with([0, 20, 50], 60, 50)
    window, pool = OFFICIAL.window_kv.encode(near), OFFICIAL.main_kv.encode(far)
    o = sparse_attn(q, window, near_rows, pool, far_rows, sink, OFFICIAL)
    near, far = OFFICIAL.window_kv.fake(near), OFFICIAL.main_kv.fake(far)
    assert_close("o", o, slow_attn(q, near, near_rows, far, far_rows, sink), rel=4e-3, floor=0)
    assert_same("stored as bf16", o, round_bf16(o))


# ---- rounding inside the chunks of 64 -------------------------------------------------------


def test_probabilities_are_rounded_relative_to_the_maximum_of_their_chunk():
    # Equal scores with values +1 and -1, one chunk apart; the larger score of the second chunk
    # rescales the first. p of the first is 1, exactly; p of the second is bf16(e^-1.1).
    records = np.float32([[0, 1, 0, 0], [0, -1, 0, 0], [1.1, 0, 0, 0]])
    rows = [[0] + [-1] * 63 + [1, 2]]
    o = attend([[[2, 0, 0, 0]]], records, rows, [NO_SINK], BF16)
    p = math.exp(-float(np.float32(1.1)))
    want = (p - float(round_bf16(np.float32([p]))[0])) / (2 * p + 1)
    assert_close("difference", o[0, 0, 1], want, rel=4e-3, floor=0)
    together = attend([[[2, 0, 0, 0]]], records, [[0, 1, 2]], [NO_SINK], BF16)
    assert together[0, 0, 1] == 0
    assert abs(attend([[[2, 0, 0, 0]]], records, rows, [NO_SINK])[0, 0, 1]) < 1e-7


def test_the_denominator_sums_unrounded_probabilities():
    # 63 rows of score ln 0.5018 beside one of 0: bf16(0.5018) is 0.5
    records = np.float32([[0, 0, 0, 0], [math.log(0.5018), 1, 0, 0]])
    o = attend([[[2, 0, 0, 0]]], records, [[0] + [1] * 63], [NO_SINK], BF16)
    want, both_rounded = np.float32([63 * 0.5 / (1 + 63 * 0.5018), 63 * 0.5 / (1 + 63 * 0.5)])
    assert round_bf16(want) != round_bf16(both_rounded)
    assert_same("weighted mean", o[0, 0, 1], round_bf16(want))


def slow_chunked(q, kv, rows, sink):
    """The released order of operations for one list, scores in float64."""
    out = np.zeros(q.shape)
    for t, h in np.ndindex(*q.shape[:2]):
        top, total, weighted = -1e30, 0.0, np.zeros(q.shape[2])
        for begin in range(0, rows.shape[1], 64):
            keys = [kv[r].astype(np.float64) for r in rows[t, begin : begin + 64] if r >= 0]
            s = [float(k @ q[t, h]) / math.sqrt(q.shape[2]) for k in keys]
            new_top = max([top, *s])
            decay = math.exp(top - new_top)
            total, weighted, top = total * decay, weighted * decay, new_top
            for key, score in zip(keys, s, strict=True):
                p = math.exp(score - new_top)
                total += p
                weighted = weighted + float(round_bf16(np.float32([p]))[0]) * key
        total += math.exp(sink[h] - top) if total else 0
        out[t, h] = weighted / total if total else 0
    return round_bf16(out.astype(np.float32))


def test_official_equals_an_explicit_loop_over_chunks():
    # few-bit data: every score is exact in float32, so only the rule can differ
    rng = np.random.default_rng(0)
    kv = rng.integers(-3, 4, size=(300, 16)).astype(np.float32) / 2
    q = rng.integers(-2, 3, size=(6, 3, 16)).astype(np.float32) / 2
    rows, sink = rows_with([0, 1, 64, 65, 129, 200], 200, 300), np.float32([NO_SINK, 0, 2])
    o, want = attend(q, kv, rows, sink, BF16), slow_chunked(q, kv, rows, sink)
    assert_close("o", o, want, rel=1e-3, floor=0)
    # a last bit of exp() may cross a rounding boundary, but seldom
    assert np.mean(o != want) < 0.01


# ---- what may not matter --------------------------------------------------------------------


@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=lambda n: n.name)
def test_bytes_of_records_that_no_query_names_are_never_read(numerics):
    records = random(40, 64)
    near, far = numerics.window_kv.encode(records), numerics.main_kv.encode(records)
    rows, q = rows_with([3, 0, 7], 12, 20), random(3, 2, 64, seed=1)
    sink = np.float32([0, NO_SINK])
    want = sparse_attn(q, near, rows, far, rows, sink, numerics)
    unnamed = np.setdiff1d(np.arange(40), rows)
    for poisoned in (near, far):
        poisoned[unnamed] = 0xFF if poisoned.dtype == np.uint8 else np.nan
    assert -1 in rows and 39 in unnamed
    assert_same("o", sparse_attn(q, near, rows, far, rows, sink, numerics), want)


@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=lambda n: n.name)
def test_a_query_alone_has_the_bits_it_has_in_a_batch(numerics):
    numerics = numerics.but(batch_invariant=True)
    records = random(200, 64)
    near, far = numerics.window_kv.encode(records), numerics.main_kv.encode(records)
    counts = [0, 1, 63, 64, 65, 100, 7, 128, 2]
    near_rows, far_rows = rows_with(counts[::-1], 128, 200), rows_with(counts, 150, 200, seed=1)
    q, sink = random(9, 4, 64, seed=1), np.float32([0, NO_SINK, 20, 1])
    together = sparse_attn(q, near, near_rows, far, far_rows, sink, numerics)
    for t in range(9):
        at = slice(t, t + 1)
        alone = sparse_attn(q[at], near, near_rows[at], far, far_rows[at], sink, numerics)
        assert_same(f"query {t}", alone, together[at])


def test_a_poisoned_query_stays_alone():
    records, rows = random(20, 8), rows_with([4, 4, 0, 9], 9, 20)
    q, sink = random(4, 2, 8, seed=1), [0, NO_SINK]
    want = attend(q, records, rows, sink)
    q[1] = np.nan
    o = attend(q, records, rows, sink)
    assert np.isnan(o[1]).all()
    assert_same("others", o[[0, 2, 3]], want[[0, 2, 3]])


@pytest.mark.parametrize("elements", [1, 1 << 10, 1 << 13])
def test_the_size_of_a_query_block_does_not_show(monkeypatch, elements):
    records, rows = random(80, 16), rows_with([70, 0, 3, 64, 65, 1, 12], 70, 80)
    q = random(7, 2, 16, seed=1)
    want = attend(q, records, rows, [0, 1])
    module = importlib.import_module("dsv41.sparse_attn")
    monkeypatch.setattr(module, "block_elements", lambda x: elements)
    assert_same("o", attend(q, records, rows, [0, 1]), want)


def test_memory_follows_the_query_block_not_the_tokens(monkeypatch):
    tokens, width, channels = 512, 512, 64
    records, q = random(600, channels), random(tokens, 1, channels, seed=1)
    rows = rows_with([width] * tokens, width, 600)
    module = importlib.import_module("dsv41.sparse_attn")
    monkeypatch.setattr(module, "block_elements", lambda x: 1 << 18)
    tracemalloc.start()
    attend(q, records, rows, [0.0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < tokens * width * channels * 4 / 8  # an eighth of gathering everything at once


@repeatable
@given(st.permutations(range(70)), st.integers(0, 69))
def test_the_order_of_the_rows_does_not_matter(order, empty):
    records, q = random(70, 8), random(1, 2, 8, seed=1)
    rows = np.where(np.arange(70) < empty, -1, np.arange(70))
    mixed = attend(q, records, rows[None, order], [0, 1])
    assert_close("o", mixed, attend(q, records, rows[None], [0, 1]))


@repeatable
@given(seed=st.integers(0, 999), sink=st.floats(-5, 5))
def test_outputs_lie_between_zero_and_the_values(seed, sink):
    records, q = random(20, 8, seed=seed), 3 * random(2, 2, 8, seed=seed + 1)
    rows = rows_with([20, 5], 20, 20, seed)
    o = attend(q, records, rows, [sink, NO_SINK])
    for t, h in np.ndindex(2, 2):
        values = records[rows[t][rows[t] >= 0]]
        low, high = values.min(axis=0), values.max(axis=0)
        if h == 0:  # the sink pulls towards zero
            low, high = np.minimum(low, 0), np.maximum(high, 0)
        assert (o[t, h] >= low - 1e-5).all() and (o[t, h] <= high + 1e-5).all()


@pytest.mark.parametrize("numerics", [FLOAT32, BF16], ids=["float32", "bf16"])
def test_attention_reads_strides(numerics):
    records, rows = random(80, 64), rows_with([70, 0, 3, 66, 9], 70, 80)
    sink, q, none = np.float32([0, 1, 2, 3]), random(5, 4, 64, seed=1), np.zeros((5, 0), np.int64)

    def with_q(q):
        return sparse_attn(q, records, rows, records, none, sink, numerics)

    def with_records(records):
        return sparse_attn(q, records, rows, records, none, sink, numerics)

    def with_rows(rows):
        return sparse_attn(q, records, rows, records, none, sink, numerics)

    assert_any_layout("q", with_q, q)
    assert_any_layout("records", with_records, records)
    assert_same("Fortran rows", with_rows(np.asfortranarray(rows)), with_rows(rows))
    assert_same("sliced rows", with_rows(np.repeat(rows, 2, axis=1)[:, ::2]), with_rows(rows))


# ---- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [3, 4, 1 << 40])
def test_a_row_beyond_the_records_is_refused_not_read(row):
    q, records = np.zeros((2, 1, 2)), np.zeros((3, 2))
    with pytest.raises(IndexError, match=f"window_rows: row {row} of 3"):
        attend(q, records, [[0, -1], [2, row]], [0])
    with pytest.raises(IndexError, match=f"global_rows: row {row} of 3"):
        attend(q, records, [[0], [0]], [0], FLOAT32, records, [[0, -1], [2, row]])


def test_any_row_of_an_empty_pool_is_refused():
    with pytest.raises(IndexError, match="global_rows: row 0 of 0"):
        attend(np.zeros((1, 1, 2)), [[1, 1]], [[0]], [0], FLOAT32, np.zeros((0, 2)), [[0]])


# ---- with rotation --------------------------------------------------------------------------

FREQS = np.float32([1, 0.01])  # base 10000 over four channels


def rotated_output(query_at, key_at, q=None):
    value = np.float32([[1, 0, 0, 1]])
    record = rotate(value, np.array([key_at]), FREQS)
    q = np.zeros((1, 1, 4), np.float32) if q is None else q
    rows, none = np.array([[0]]), np.zeros((1, 0), np.int64)
    sink = np.float32([NO_SINK])
    at = np.array([query_at])
    return rope_sparse_attn(q, at, FREQS, record, rows, record, none, sink, FLOAT32)[0, 0]


def test_the_output_is_turned_back_by_the_position_of_the_query():
    want = [-0.416146837, -0.909297427, 0.019998667, 0.999800007]
    assert_close("two apart", rotated_output(5, 3), want, rel=1e-6)
    assert_close("far out", rotated_output(1002, 1000), want, rel=1e-4)
    assert_close("own key", rotated_output(5, 5), [1, 0, 0, 1], rel=1e-6)


def test_the_query_is_turned_before_it_scores():
    # the keys at 3 and 5 are one direction, turned; the query of position 5 matches the second
    direction = np.float32([[1, 0, 0, 0], [1, 0, 0, 0]])
    records = rotate(direction, np.array([3, 5]), FREQS)
    q, rows, none = np.float32([[[8, 0, 0, 0]]]), np.array([[0, 1]]), np.zeros((1, 0), np.int64)
    sink, at = np.float32([NO_SINK]), np.array([5])
    o = rope_sparse_attn(q, at, FREQS, records, rows, records, none, sink, FLOAT32)
    s = np.exp(4 * np.cos(FREQS[0] * np.float64([2, 0])))  # 8 / sqrt(4) cos(distance)
    want = (s[0] * np.exp(-2j) + s[1]) / s.sum()
    assert_close("o", o[0, 0, :2], [want.real, want.imag], rel=1e-6)


def test_shifting_every_position_changes_nothing():
    records, q, rows = random(30, 4), random(3, 2, 4, seed=1), rows_with([5, 1, 9], 9, 30)
    none, sink = np.zeros((3, 0), np.int64), np.float32([0, 1])

    def shifted(by):
        at = np.array([40, 50, 60]) + by
        turned = rotate(records, np.arange(30) + by, FREQS)
        return rope_sparse_attn(q, at, FREQS, turned, rows, turned, none, sink, FLOAT32)

    assert_close("o", shifted(100), shifted(0), rel=3e-5)


def test_official_stores_the_turned_query_and_both_outputs_as_bf16():
    records, rows = OFFICIAL.window_kv.encode(random(30, 32)), rows_with([5, 1, 9], 9, 30)
    pool, none, sink = OFFICIAL.main_kv.encode(random(0, 32)), np.zeros((3, 0), int), np.zeros(2)
    q, at, sink = random(3, 2, 32, seed=1), np.array([40, 50, 60]), sink.astype(np.float32)
    o = rope_sparse_attn(q, at, FREQS, records, rows, pool, none, sink, OFFICIAL)
    turned = round_bf16(rotate(q, at, FREQS))
    plain = sparse_attn(turned, records, rows, pool, none, sink, OFFICIAL)
    assert_same("o", o, round_bf16(rotate(plain, at, FREQS, inverse=True)))
