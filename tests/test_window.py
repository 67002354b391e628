"""Who sees which recent tokens: batches by hand, the ring against a plain list, the records."""

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
from compare import assert_any_layout, assert_close, assert_same, repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41.batch import TEXT, Batch, make_batch
from dsv41.formats import round_bf16
from dsv41.quant import FLOAT32, OFFICIAL, WINDOW_KV_FP8, quantize_weight
from dsv41.rope import rotate
from dsv41.sparse_attn import sparse_attn
from dsv41.window import window_index, window_kv, window_records


def ids(count):
    return np.arange(count, dtype=np.int64)


# ---- batches --------------------------------------------------------------------------------


def test_a_batch_lays_requests_end_to_end():
    batch = make_batch([[7, 8], [9], [4, 5, 6]], starts=[0, 10, 3], slots=[2, 0, 5])
    assert batch.count == 3
    assert_same("ids", batch.ids, np.array([7, 8, 9, 4, 5, 6]))
    assert_same("positions", batch.positions, np.array([0, 1, 10, 3, 4, 5]))
    assert_same("order", batch.order, np.array([0, 0, 1, 2, 2, 2]))
    assert_same("starts", batch.starts, np.array([0, 0, 10, 3, 3, 3]))
    assert_same("offsets", batch.offsets, np.array([0, 0, 2, 3, 3, 3]))
    assert_same("floors", batch.floors, np.zeros(6, np.int64))
    assert_same("lengths", batch.lengths, np.array([2, 1, 3]))
    assert list(batch.segments()) == [
        (2, slice(0, 2), 0, 2),
        (0, slice(2, 3), 10, 11),
        (5, slice(3, 6), 3, 6),
    ]


def test_a_token_is_text_unless_its_type_says_otherwise():
    text = make_batch([[1, 2]], [0], [0])
    assert_same("types", text.types, np.array([TEXT, TEXT]))
    assert not text.is_image.any()
    mixed = make_batch([[1, 2], [3, 4]], [0, 0], [0, 1], types=[[TEXT, 0], [2, TEXT]])
    assert mixed.is_image.tolist() == [False, True, True, False]


def same_batch(got, want):
    for field in fields(Batch):
        assert_same(field.name, getattr(got, field.name), getattr(want, field.name))


def test_the_tail_of_every_request_is_the_batch_of_the_tails():
    whole = make_batch([ids(5), ids(2), ids(3)], starts=[0, 7, 4], slots=[1, 0, 3])
    tail = whole.only(np.array([0, 0, 0, 1, 1, 0, 1, 0, 0, 1], bool))
    want = make_batch([[3, 4], [1], [2]], starts=[3, 8, 6], slots=[1, 0, 3])
    same_batch(tail, want)
    assert_same("rows", window_index(tail, 4), window_index(want, 4))


def test_a_request_left_without_rows_keeps_its_place():
    whole = make_batch([ids(2), ids(1), ids(2)], starts=[0, 7, 4], slots=[1, 0, 3])
    rest = whole.only(np.array([1, 0, 0, 0, 1], bool))
    assert rest.count == 3
    assert_same("lengths", rest.lengths, np.array([1, 0, 1]))
    assert_same("order", rest.order, np.array([0, 2]))
    assert list(rest.segments()) == [(1, slice(0, 1), 0, 1), (3, slice(1, 2), 5, 6)]
    # its ring stays at its place, so the rows of the call still start behind three rings
    assert_same("rows", window_index(rest, 2), np.array([[6, -1], [4, 7]]))
    assert list(whole.only(np.zeros(5, bool)).segments()) == []


def test_floors_are_given_by_slot():
    batch = make_batch([ids(2), ids(1)], starts=[0, 7], slots=[5, 2])
    same_batch(batch.with_floors({2: 9, 5: 1}), replace(batch, floors=np.array([1, 1, 9])))
    same_batch(batch.with_floors([0, 0, 9, 0, 0, 1]), replace(batch, floors=np.array([1, 1, 9])))


# ---- which rows a query reads ---------------------------------------------------------------


def test_window_rows_by_hand():
    # W = 4. Request 0 brings positions 5, 6 (ring rows 0-3), request 1 positions 0, 1, 2 (4-7).
    batch = make_batch([ids(2), ids(3)], starts=[5, 0], slots=[0, 1])
    rows = window_index(batch, 4)
    want = [
        [2, 3, 0, 8],  # query 5 sees 2, 3, 4 in the ring, itself in the call
        [3, 0, 8, 9],
        [10, -1, -1, -1],
        [10, 11, -1, -1],
        [10, 11, 12, -1],
    ]
    assert_same("rows", rows, np.array(want))


def test_positions_before_the_floor_are_not_seen():
    batch = make_batch([ids(4)], starts=[4], slots=[0])
    # a replay that starts at position 4 finds nothing valid in the ring
    rows = window_index(replace(batch, floors=np.full(4, 4)), 4)
    want = [[4, -1, -1, -1], [4, 5, -1, -1], [4, 5, 6, -1], [4, 5, 6, 7]]
    assert_same("rows", rows, np.array(want))
    rows = window_index(replace(batch, floors=np.full(4, 3)), 4)
    assert_same("one from the ring", rows[0], np.array([3, 4, -1, -1]))


def test_a_floor_beyond_the_query_leaves_nothing():
    batch = replace(make_batch([ids(2)], starts=[1], slots=[0]), floors=np.array([9, 9]))
    assert (window_index(batch, 3) == -1).all()


def ring_after(ring, width, start, records):
    """The ring with a request's new records written token by token."""
    ring = ring.copy()
    for i, record in enumerate(records):
        ring[(start + i) % width] = record
    return ring


@repeatable
@given(
    width=st.integers(1, 9),
    chunks=st.lists(st.lists(st.integers(0, 11), min_size=3, max_size=3), min_size=1, max_size=6),
)
def test_any_chunking_reads_the_same_positions_as_a_plain_list(width, chunks):
    # a record holds its request and its position; three requests advance in the same calls
    rings = np.full((3, width, 2), -9, np.int64)
    length = [0, 0, 0]
    for chunk in chunks:
        alive = [r for r in range(3) if chunk[r]]
        if not alive:
            continue
        starts = [length[r] for r in alive]
        batch = make_batch([ids(chunk[r]) for r in alive], starts, alive)
        new = np.stack([np.array(alive)[batch.order], batch.positions], axis=1)
        records, rows = window_records(rings[alive], new), window_index(batch, width)
        for token, (r, p) in enumerate(new.tolist()):
            seen = [records[row].tolist() for row in rows[token] if row >= 0]
            assert seen == [[r, j] for j in range(max(0, p - width + 1), p + 1)]
            assert (rows[token, len(seen) :] == -1).all()
        for r, part, start, stop in batch.segments():
            rings[r] = ring_after(rings[r], width, start, new[part])
            length[r] = stop


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 128, 129, 257])
def test_a_first_call_around_the_released_window_of_128(count):
    rows = window_index(make_batch([ids(count)], [0], [0]), 128)
    assert rows.shape == (count, 128) and rows.dtype == np.int64
    last = rows[-1][rows[-1] >= 0] - 128  # the ring comes first
    assert_same("last query", last, np.arange(max(0, count - 128), count))


def test_rows_of_a_large_batch_do_not_wrap():
    batch = make_batch([ids(1)] * 3, starts=[70_000 * 32_768] * 3, slots=[0, 1, 2])
    assert batch.positions.dtype == np.int64
    rows = window_index(batch, 128)
    assert rows.min() >= 0 and rows.max() == 3 * 128 + 2


# ---- values through attention ---------------------------------------------------------------


def last_outputs(prompt, sink, chunk, until=12):
    """Output of the last token of each call; q = 0, the value at position i is i, W = 4."""
    width, ring, length, out = 4, np.full((1, 4, 1), np.nan, np.float32), 0, {}
    calls = [chunk] * (prompt // chunk) + [prompt % chunk] * (prompt % chunk > 0)
    for count in calls + [1] * (until - prompt):
        batch = make_batch([ids(count)], [length], [0])
        new = batch.positions.astype(np.float32)[:, None]
        rows = window_index(batch, width)
        records = window_records(ring, new)
        q, none = np.zeros((count, 1, 1), np.float32), np.zeros((count, 0), np.int64)
        o = sparse_attn(q, records, rows, records[:0], none, np.float32([sink]), FLOAT32)
        ring[0] = ring_after(ring[0], width, length, new)
        length += count
        out[length - 1] = o[-1, 0, 0]
    return out


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 99])
@pytest.mark.parametrize("prompt", [3, 4, 5, 8, 9])
def test_equal_scores_average_the_last_four_positions(prompt, chunk):
    out = last_outputs(prompt, -np.inf, min(chunk, prompt))
    want = {3: 1.0, 4: 1.5, 5: 2.5, 8: 5.5, 9: 6.5}[prompt]
    assert_close("end of the prompt", out[prompt - 1], want, rel=1e-6)
    for p, value in out.items():
        assert_close(f"position {p}", value, p - 1.5 if p >= 3 else p / 2, rel=1e-6)


def test_a_sink_takes_its_share_of_the_window():
    out = last_outputs(1, 0.0, 1)
    for p, want in {3: 1.2, 4: 2.0, 7: 4.4}.items():
        assert_close(f"position {p}", out[p], want, rel=1e-6)


# ---- records --------------------------------------------------------------------------------

CONFIG = SimpleNamespace(rms_norm_eps=1e-20)
FREQS = np.float32([1, 0.25, 0.01])


def window_params(channels=32, hidden=64):
    rng = np.random.default_rng(0)
    wkv = quantize_weight(rng.normal(size=(channels, hidden)).astype(np.float32), "tiles")
    norm = round_bf16(1 + 0.1 * rng.normal(size=channels).astype(np.float32))
    return {"wkv": {"weight": wkv}, "kv_norm": {"weight": norm}}


def inputs(count, hidden=64):
    x = np.random.default_rng(1).normal(size=(count, hidden)).astype(np.float32)
    return round_bf16(x), 7 * np.arange(count)


def slow_latent(x, p):
    """RMSNorm(x W^T) in float64, no rounding."""
    y = x.astype(np.float64) @ p["wkv"]["weight"].dense().astype(np.float64).T
    y = y / np.sqrt(np.mean(y * y, axis=1, keepdims=True) + 1e-20)
    return y * p["kv_norm"]["weight"]


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65])
def test_window_kv_is_the_normed_latent_turned_by_its_position(count):
    p = window_params()
    x, at = inputs(count)
    latent = slow_latent(x, p)
    pairs = latent[:, -6::2] + 1j * latent[:, -5::2]
    turned = pairs * np.exp(1j * at[:, None] * FREQS.astype(np.float64))
    latent[:, -6::2], latent[:, -5::2] = turned.real, turned.imag
    records = window_kv(x, p, at, FREQS, CONFIG, FLOAT32)
    assert records.shape == (count, 32) and records.dtype == np.float32
    assert_close("latent", records, latent)


def test_official_records_round_at_each_step_and_quantise_the_rotated_channels_too():
    p = window_params()
    x, at = inputs(65)
    y = WINDOW_KV_FP8.fake(x).astype(np.float64) @ p["wkv"]["weight"].dense().T.astype(np.float64)
    y = round_bf16(y.astype(np.float32)).astype(np.float64)  # the linear's output
    y = y / np.sqrt(np.mean(y * y, axis=1, keepdims=True) + 1e-20) * p["kv_norm"]["weight"]
    y = round_bf16(y.astype(np.float32))
    want = WINDOW_KV_FP8.encode(round_bf16(rotate(y, at, FREQS)))
    records = window_kv(x, p, at, FREQS, CONFIG, OFFICIAL)
    assert records.shape == (65, 33)
    assert_same("records", records, want)


def test_a_token_alone_writes_the_same_record_as_in_a_batch():
    p = window_params()
    x, at = inputs(9)
    for numerics in (OFFICIAL.but(batch_invariant=True), FLOAT32.but(batch_invariant=True)):
        together = window_kv(x, p, at, FREQS, CONFIG, numerics)
        for t in range(9):
            one = slice(t, t + 1)
            alone = window_kv(x[one], p, at[one], FREQS, CONFIG, numerics)
            assert_same(f"token {t}", alone, together[one])


def test_window_kv_reads_strides():
    p, (x, at) = window_params(), inputs(5)
    for numerics in (FLOAT32, OFFICIAL):
        assert_any_layout("records", lambda v, n=numerics: window_kv(v, p, at, FREQS, CONFIG, n), x)
