"""The indexer's kernels: scores to the bit, choices to the index, gradients to rounding."""

from dataclasses import replace

import numpy as np
import pytest
from fake_cuda import fake_cuda, on_device  # noqa: F401 (a fixture)

from dsv41.cache import paged_rows
from dsv41.indexer import candidate_blocks, index_scores, index_topk, pool_entries, pool_topk
from dsv41.quant import FLOAT32, INDEX_FP4, OFFICIAL
from dsv41.selection import Entries, choose_anywhere, choose_in_pool
from dsv41.train.indexer import selection_backward

MODES = [FLOAT32, OFFICIAL, FLOAT32.but(bf16=True)]
SHAPES = [(4, 32), (3, 64), (32, 128)]  # heads, channels; the first is the miniature's


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def eighths(*shape, seed=0):
    """Multiples of 1/8 up to 1: sums of their products are exact in any order, and often tie."""
    return np.float32(np.random.default_rng(seed).integers(-8, 9, shape) / 8)


def queries(tokens, heads, channels, numerics, seed=0):
    q, w = normal(tokens, heads, channels, seed=seed), normal(tokens, heads, seed=seed + 1)
    return numerics.index.fake(numerics.store(q)), numerics.store(w)


def keys(count, channels, numerics, seed=2):
    return numerics.index.encode(normal(count, channels, seed=seed))


def ragged(lengths, starts, ratio, numerics, heads=4, channels=32, page_tokens=16, seed=0):
    """Requests of these lengths whose pages lie in any order -> q, w, Entries."""
    rng, per_page = np.random.default_rng(seed), page_tokens // ratio
    ends = np.array(starts) + lengths
    counts = -(-ends // page_tokens)
    free, pages = list(rng.permutation(counts.sum() + 3)), np.zeros((len(ends), counts.max()), int)
    for row, count in zip(pages, counts, strict=True):
        row[:count] = [free.pop() for _ in range(count)]
    order = np.repeat(np.arange(len(ends)), lengths)
    begins = np.cumsum(lengths) - lengths
    positions = np.arange(len(order)) - begins[order] + np.array(starts)[order]
    spans = [(r, slice(b, b + n)) for r, (b, n) in enumerate(zip(begins, lengths, strict=True))]
    records = numerics.index.encode(eighths((counts.sum() + 3) * per_page, channels, seed=2))
    reach = (positions + 1) // ratio
    q = numerics.index.fake(eighths(len(order), heads, channels, seed=seed))
    w = eighths(len(order), heads, seed=seed + 1)
    return q, w, Entries(records, pages, per_page, order, reach.copy(), spans, reach)


def moved(x, to):
    """x with its arrays passed through `to`; `reach` stays in CPU memory."""
    if isinstance(x, Entries):
        names = ("keys", "pages", "order", "visible")
        return replace(x, **{name: to(getattr(x, name)) for name in names})
    return to(x) if isinstance(x, np.ndarray) else x


# ---- on a GPU -----------------------------------------------------------------------------------


def on_both(cupy, op, *arguments):
    """-> lists of the results of the definition and of the kernel, as NumPy arrays."""
    want, got = op.definition(*arguments), op(*(moved(a, cupy.asarray) for a in arguments))
    as_list = [r if isinstance(r, tuple) else (r,) for r in (want, got)]
    return [[None if x is None else np.asarray(_host(x)) for x in some] for some in as_list]


def _host(x):
    return x.get() if hasattr(x, "get") else x


def assert_equal(cupy, op, *arguments):
    for want, got in zip(*on_both(cupy, op, *arguments), strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            assert want.dtype == got.dtype and want.shape == got.shape
            assert np.array_equal(want, got), np.argwhere(want != got)[:5]


def assert_scores(want, got, bf16):
    """To the bit where products are stored as bf16, except for one that another order of float32
    sums has moved across a tie; else to rounding.
    """
    error = np.abs(want - got)
    assert error.max(initial=0) <= (2.0**-7 if bf16 else 1e-5) * np.abs(want).max(initial=1)
    if bf16:
        assert np.count_nonzero(error) <= 0.02 * error.size


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", MODES, ids=["float32", "official", "bf16"])
@pytest.mark.parametrize("heads, channels", SHAPES)
@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 1000])
def test_scores(cupy, numerics, heads, channels, count):
    q, w = queries(5, heads, channels, numerics)
    shared = keys(count, channels, numerics)
    listed = keys(5 * count, channels, numerics).reshape(5, count, shared.shape[-1])
    for records in (shared, listed):
        (want,), (got,) = on_both(cupy, index_scores, q, w, records, numerics)
        assert want.shape == got.shape
        assert_scores(want, got, numerics.bf16)


FOUR_BIT = FLOAT32.but(index=INDEX_FP4)  # MXFP4 keys, float32 arithmetic


def spread_keys(count, spread, numerics, seed=5):
    """Records whose groups of 32 differ in scale by up to 2^(2 spread)."""
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.integers(-spread, spread + 1, (count, 4))).repeat(32, axis=1)
    return numerics.index.encode(np.float32(normal(count, 128, seed=seed) * scale))


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", [OFFICIAL, FOUR_BIT], ids=["official", "four bits"])
@pytest.mark.parametrize("version", [f"scores_v{n}" for n in range(1, 7)])
@pytest.mark.parametrize("tokens, count", [(1, 1), (1, 33), (3, 4096), (17, 255), (70, 1000)])
@pytest.mark.parametrize("spread", [0, 6])
def test_every_version_of_the_scores(cupy, numerics, version, tokens, count, spread):
    from dsv41_kernels.index_scores import cupy_op

    q, w = queries(tokens, 32, 128, numerics)
    records = spread_keys(count, spread, numerics)
    known = {"HEADS": 32, "CHANNELS": 128, "PACKED": 1, "BF16": int(numerics.bf16)}
    run = getattr(cupy_op, version)
    got = run(known, *map(cupy.asarray, (q, w, records))).get()
    assert_scores(index_scores.definition(q, w, records, numerics), got, numerics.bf16)
    for _ in range(3):
        assert np.array_equal(run(known, *map(cupy.asarray, (q, w, records))).get(), got)


def unlike_keys(count, share, seed=6):
    """Records of which some are not whole numbers times one power of two, for every reason."""
    rng = np.random.default_rng(seed)
    records = spread_keys(count, 1, OFFICIAL, seed)
    odd = np.flatnonzero(rng.random(count) < share)
    for kind, rows in enumerate(np.array_split(rng.permutation(odd), 7)):
        if kind == 0:  # scales far apart
            records[rows] = spread_keys(len(rows), 6, OFFICIAL, seed)
        elif kind == 1:  # an empty group
            records[rows, 16:32] = 0x80
        elif kind == 2:  # no number, in a group that is empty or not
            records[rows, 64 + rng.integers(0, 4, len(rows))] = 255
        elif kind == 3:  # powers of two at the ends of the range
            records[rows, 64:] = rng.choice([1, 2, 95, 96, 159, 160, 253, 254], (len(rows), 1))
        elif kind == 4:  # one group of another scale
            records[rows, 64 + rng.integers(0, 4, len(rows))] += np.uint8(4)
        elif kind == 5:
            records[rows] = 0
        else:
            records[rows, 64:] = 0
    return records


def unlike_queries(tokens, numerics):
    """Queries of which two do not fit into bytes, one not even into E4M3, and odd weights."""
    q, w = queries(max(tokens, 7), 32, 128, numerics)
    q[1, 5, :32] *= np.float32(2.0**-9)
    q[2, 3, 40] = 1.2345
    q[3, 7] = 0
    w[4], w[5, ::3], w[6, 2] = 0, 0, 2.0**-70
    return q, w


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", [OFFICIAL, FOUR_BIT], ids=["official", "four bits"])
@pytest.mark.parametrize("share", [0, 0.001, 0.5])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("tokens, count", [(1, 2000), (21, 700), (70, 5000)])
def test_whole_numbers_give_the_bits_of_fp8(cupy, numerics, share, alike, tokens, count):
    from dsv41_kernels.index_scores import cupy_op

    q, w = queries(tokens, 32, 128, numerics) if alike else unlike_queries(tokens, numerics)
    records = unlike_keys(count, share)
    known = {"HEADS": 32, "CHANNELS": 128, "PACKED": 1, "BF16": int(numerics.bf16)}
    arrays = [cupy.asarray(x) for x in (q, w, records)]
    want = [run(known, *arrays).get() for run in (cupy_op.scores_v3, cupy_op.scores_v4)]
    got = [run(known, *arrays).get() for run in (cupy_op.scores_v5, cupy_op.scores_v6)]
    assert np.array_equal(want[0], got[0], equal_nan=True)
    assert np.array_equal(want[1], got[1], equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 20])
def test_a_query_that_four_bits_do_not_hold_is_scored_all_the_same(cupy, tokens):
    q, w = queries(tokens, 32, 128, OFFICIAL)
    q[0, 5, 7] = 1.2345
    q[-1, 3] = 0
    records = keys(300, 128, OFFICIAL)
    (want,), (got,) = on_both(cupy, index_scores, q, w, records, OFFICIAL)
    assert_scores(want, got, True)


@pytest.mark.gpu
def test_a_score_does_not_know_its_neighbours(cupy):
    """Row 0 alone is row 0 of a batch, keys alone are keys among others, to the bit."""
    q, w = queries(9, 32, 128, OFFICIAL)
    records = keys(2000, 128, OFFICIAL)
    q, w, records = map(cupy.asarray, (q, w, records))
    together = index_scores(q, w, records, OFFICIAL)
    alone = index_scores(q[:1], w[:1], records[:32], OFFICIAL)
    assert np.array_equal(together[:1, :32].get(), alone.get())
    many = index_scores(cupy.concatenate([q, q]), cupy.concatenate([w, w]), records, OFFICIAL)
    assert np.array_equal(many[:9].get(), together.get())  # prefill's kernel, too


def long_rows(count):
    """Rows that are unkind in different ways, and how much of each is visible."""
    rng, rows = np.random.default_rng(count), normal(11, count, seed=count)
    rows[1], rows[2] = rng.integers(-2, 3, count), 1
    rows[3, : count - 40] = -np.inf
    rows[4] = np.round(rows[4] * 64) / 64  # as bf16 would
    rows[5], rows[6] = np.sort(rows[5]), -np.sort(rows[6])
    rows[7] = rng.integers(-3, 4, count) * np.float32(1e-45)  # subnormal numbers
    rows[8, sampled(count)[:224]] += 10  # a sample that lies: too few reach what it promises
    rows[9, count // 3 : count // 3 + count // 20] += 10  # all of the best are neighbours
    rows[10] = np.where(rng.random(count) < 0.3, np.inf, rows[10])
    visible = np.full(11, count)
    visible[4:8] = count - 3, count // 2, count // 100, count + 7
    return rows, visible


def sampled(count, span=8192):
    """Where a block of threads looks before it knows a row (topk_ordered.cuh): runs of 32."""
    runs, places = np.arange(span // 32), count // span
    begins = 32 * (runs * places + ((runs * 0x9E3779B1) % 2**32 * places >> 32))
    return (begins[:, None] + np.arange(32)).ravel()


@pytest.mark.gpu
@pytest.mark.parametrize("count, k", [(51_201, 512), (70_001, 1), (1 << 20, 512), (262_144, 2048)])
def test_topk_of_long_rows(cupy, count, k):
    scores, visible = long_rows(count)
    assert_equal(cupy, index_topk, scores, visible, k)
    assert_equal(cupy, candidate_blocks, scores, visible, 8, k)
    assert_equal(cupy, candidate_blocks, scores[:, 1:].copy(), visible - 1, 8, k)


TOPK_VERSIONS = {
    "v2": lambda o, *a: o.choose_long("index_topk", a[:2], a[0].shape[1], a[2]),
    "short v3": lambda o, *a: o.choose_short(*a, version="v3"),
    "short v4": lambda o, *a: o.choose_short(*a),
    "long": lambda o, *a: o.choose_long(*a),
    "2 parts": lambda o, *a: o.choose_rows(*a, parts=2),
    "9 parts": lambda o, *a: o.choose_rows(*a, parts=9),
    "9 parts v3": lambda o, *a: o.choose_rows(*a, parts=9, version="v3"),
    "256 parts": lambda o, *a: o.choose_rows(*a, parts=256),
}
SHORT_SIZES = [(16_384, 512), (16_384, 3000), (5001, 1)]
LONG_SIZES = [(51_201, 1), (300_000, 512), (300_001, 4096)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "version, count, k",
    [
        (version, *sizes)
        for version in TOPK_VERSIONS
        for sizes in (SHORT_SIZES if version.startswith("short") else LONG_SIZES)
    ],
)
def test_every_version_of_topk(cupy, version, count, k):
    from dsv41_kernels import longrows, orderedrows

    scores, visible = long_rows(count)
    module = longrows if version == "v2" else orderedrows
    arrays = cupy.asarray(scores), cupy.asarray(visible)
    for _ in range(3):
        got = TOPK_VERSIONS[version](module, *arrays, k).get()
        assert np.array_equal(got, index_topk.definition(scores, visible, k))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1000, 20_000, 1 << 20])
def test_topk_never_chooses_nan(cupy, count):
    scores = normal(3, count)
    scores[:, ::3] = np.nan
    scores[1, 1::3] = -np.nan
    scores[2] = np.nan
    got = index_topk(cupy.asarray(scores), cupy.full(3, count, np.int64), 512).get()
    without = np.where(np.isnan(scores), np.float32(-np.inf), scores)
    assert np.array_equal(got, index_topk.definition(without, np.full(3, count), 512))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 300])
def test_topk_of_a_row_does_not_know_how_many_there_are(cupy, rows):
    scores = cupy.asarray(normal(rows, 60_000))
    visible = cupy.full(rows, 60_000, np.int64)
    together = index_topk(scores, visible, 512).get()
    assert np.array_equal(index_topk(scores[-1:], visible[-1:], 512).get(), together[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 511, 512, 513, 8191, 16384])
def test_topk_with_ties_and_infinities(cupy, count):
    rng, rows = np.random.default_rng(count), 6
    scores = normal(rows, count)
    scores[1] = rng.integers(-2, 3, count)
    scores[2] = 7
    scores[3, : count // 2] = -np.inf
    scores[4] = np.where(rng.random(count) < 0.5, -0.0, 0.0)
    visible = np.array([count, count, max(count - 1, 0), count, count, count // 2])
    for k in (1, 64, 512):
        assert_equal(cupy, index_topk, scores, visible, k)
    for size, budget in ((8, 64), (4, 3), (1, 5)):
        assert_equal(cupy, candidate_blocks, scores, visible, size, budget)


@pytest.mark.gpu
@pytest.mark.parametrize("listed", [1, 7, 512, 16384, 20_000])
def test_topk_in_a_list(cupy, listed):
    rng = np.random.default_rng(listed)
    scores, entries = normal(4, listed), np.sort(rng.integers(0, 3 * listed, (4, listed)))
    scores[1], scores[2] = 1, rng.integers(0, 3, listed)
    entries[:, listed - listed // 4 :] = -1
    assert_equal(cupy, pool_topk, scores, entries, rng.integers(0, 3 * listed + 1, 4), 64)


RAGGED = [([1, 7, 33, 130], [0, 3, 0, 5]), ([4096], [0]), ([1, 1, 1], [4095, 64, 0])]


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", MODES[:2], ids=["float32", "official"])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("lengths, starts", RAGGED)
def test_a_ragged_batch(cupy, numerics, ratio, lengths, starts):
    q, w, entries = ragged(lengths, starts, ratio, numerics)
    for pool in (None, (8, 64), (4, 3)):
        assert_equal(cupy, choose_anywhere, q, w, entries, 64, pool, numerics)
    chosen, blocks = choose_anywhere.definition(q, w, entries, 64, (8, 64), numerics)
    assert_equal(cupy, choose_in_pool, q, w, entries, blocks, 8, 64, numerics)
    request = entries.order[:, None]
    assert_equal(cupy, paged_rows, chosen, entries.pages, request, entries.per_page)
    assert_equal(cupy, paged_rows, chosen[0], entries.pages, 0, entries.per_page)


def assert_alike(want, got, share=0.01):
    """The same choices (T, k), but for entries whose scores lay on a tie of bf16."""
    assert want.shape == got.shape
    both = np.mean([np.mean(np.isin(b, a)) for a, b in zip(want, got, strict=True)])
    assert both >= 1 - share, both
    ordered = np.where(got < 0, np.iinfo(np.int64).max, got)
    assert (ordered[:, 1:] >= ordered[:, :-1]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("lengths, starts", [*RAGGED, ([1, 2, 1], [70_000, 130, 4000])])
def test_a_ragged_batch_at_the_released_sizes(cupy, ratio, lengths, starts):
    q, w, entries = ragged(lengths, starts, ratio, OFFICIAL, 32, 128, page_tokens=64)
    want, got = on_both(cupy, choose_anywhere, q, w, entries, 64, (8, 32), OFFICIAL)
    assert_alike(want[0], got[0])
    assert_alike(want[1], got[1])
    arguments = q, w, entries, want[1], 8, 64, OFFICIAL
    (want,), (got,) = on_both(cupy, choose_in_pool, *arguments)
    assert_alike(want, got)


@pytest.mark.gpu
def test_records_beyond_two_gigabytes(cupy):
    """The pages of the request lie behind 2^31 bytes of others."""
    q, w, entries = ragged([2], [500], 1, OFFICIAL, 32, 128, page_tokens=64)
    first = -(-(1 << 31) // (68 * 64)) + 5  # pages in front
    records = cupy.zeros((64 * first + len(entries.keys), 68), np.uint8)
    records[64 * first :] = cupy.asarray(entries.keys)
    near = [moved(a, cupy.asarray) for a in (q, w, entries)]
    far = replace(near[2], keys=records, pages=near[2].pages + first)
    for pool in (None, (8, 32)):
        want = choose_anywhere(*near, 64, pool, OFFICIAL)
        got = choose_anywhere(*near[:2], far, 64, pool, OFFICIAL)
        for ours, theirs in zip(want, got, strict=True):
            assert ours is theirs or np.array_equal(ours.get(), theirs.get())
    arguments = got[1], 8, 64, OFFICIAL
    inside = [choose_in_pool(*near[:2], some, *arguments).get() for some in (near[2], far)]
    assert np.array_equal(*inside)


@pytest.mark.gpu
def test_a_query_chooses_alone_what_it_chooses_in_a_batch(cupy):
    q, w, entries = ragged([40, 300], [0, 10], 1, FLOAT32)
    together = choose_anywhere(
        *(moved(a, cupy.asarray) for a in (q, w, entries)), 64, None, FLOAT32
    )
    for t in (0, 39, 40, 339):
        alone = replace(entries, order=entries.order[t : t + 1], visible=entries.visible[t : t + 1])
        alone = replace(alone, reach=entries.reach[t : t + 1], spans=[(0, slice(0, 1))])
        arguments = q[t : t + 1], w[t : t + 1], alone
        got, _ = choose_anywhere(*(moved(a, cupy.asarray) for a in arguments), 64, None, FLOAT32)
        assert np.array_equal(got.get()[0], together[0].get()[t])


@pytest.mark.gpu
def test_whoever_watches_is_shown_every_score(cupy):
    q, w, entries = ragged([5, 40], [0, 0], 1, FLOAT32)
    shown = {}
    arguments = [moved(a, cupy.asarray) for a in (q, w, entries)]
    chosen, _ = choose_anywhere(
        *arguments, 8, None, FLOAT32, lambda at, s, e: shown.update({at.start: s.shape})
    )
    assert shown == {0: (5, 5), 5: (40, 40)}
    unseen, _ = choose_anywhere(*arguments, 8, None, FLOAT32)
    assert np.array_equal(chosen.get(), unseen.get())


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", MODES[:2], ids=["float32", "official"])
@pytest.mark.parametrize("lengths, starts", [([1, 7, 33, 130], [0, 0, 0, 0]), ([2000], [0])])
def test_the_index_loss_and_its_gradients(cupy, numerics, lengths, starts):
    q, w, entries = ragged(lengths, starts, 1, numerics)
    chosen, _ = choose_anywhere.definition(q, w, entries, 64, None, numerics)
    rows = paged_rows(chosen, entries.pages, entries.order[:, None], entries.per_page)
    attention = np.where(rows < 0, 0, np.exp(normal(*rows.shape))).astype(np.float32)
    attention[3 % len(q)] = 0
    arguments = q, w, entries.keys, rows, attention, 0.25, numerics
    want, got = on_both(cupy, selection_backward, *arguments)
    for name, ours, theirs in zip(("loss", "dq", "dw", "dkeys"), want, got, strict=True):
        assert ours.shape == theirs.shape, name
        assert np.abs(ours - theirs).max() <= 2e-5 * max(1, np.abs(ours).max()), name
    for _ in range(3):
        again = on_both(cupy, selection_backward, *arguments)[1]
        assert all(np.array_equal(a, b) for a, b in zip(got, again, strict=True))


# ---- without one --------------------------------------------------------------------------------


def on_fake(*arguments):
    return [moved(a, on_device) for a in arguments]


def test_every_wrapper_launches_and_says_what_shape_comes_back(fake_cuda):  # noqa: F811
    q, w, entries = ragged([3, 20], [0, 0], 1, FLOAT32)
    q, w, entries = on_fake(q, w, entries)
    chosen, blocks = choose_anywhere(q, w, entries, 6, (4, 5), FLOAT32)
    assert chosen.shape == (23, 6) and blocks.shape == (23, 5) and chosen.dtype == np.int64
    assert choose_anywhere(q, w, entries, 6, None, FLOAT32)[1] is None
    assert choose_in_pool(q, w, entries, blocks, 4, 6, FLOAT32).shape == (23, 6)
    rows = paged_rows(chosen, entries.pages, entries.order[:, None], entries.per_page)
    assert rows.shape == chosen.shape
    scores = index_scores(q, w, entries.keys, FLOAT32)
    assert scores.shape == (23, len(entries.keys)) and scores.dtype == np.float32
    assert index_topk(scores, entries.visible, 7).shape == (23, 7)
    assert candidate_blocks(scores, entries.visible, 4, 3).shape == (23, 3)
    assert pool_topk(scores[:, :4], chosen[:, :4], entries.visible, 5).shape == (23, 5)
    names = [op for op, *_ in fake_cuda]
    assert names == (
        ["choose_anywhere"] * 2
        + ["choose_in_pool", "paged_rows", "index_scores"]
        + ["index_topk", "candidate_blocks", "pool_topk"]
    )


def test_released_sizes_and_long_rows_take_several_launches(fake_cuda):  # noqa: F811
    q, w, entries = on_fake(*ragged([1, 1], [200, 90], 1, OFFICIAL, 32, 128, page_tokens=64))
    chosen, blocks = choose_anywhere(q, w, entries, 6, (8, 5), OFFICIAL)
    assert chosen.shape == (2, 6) and blocks.shape == (2, 5)
    assert choose_in_pool(q, w, entries, blocks, 8, 6, OFFICIAL).shape == (2, 6)
    assert index_scores(q, w, entries.keys, OFFICIAL).shape == (2, len(entries.keys))
    many = [on_device(np.concatenate([np.asarray(a)] * 8)) for a in (q, w)]
    assert index_scores(*many, entries.keys, OFFICIAL).shape == (16, len(entries.keys))
    long = on_device(np.zeros((1, 1 << 18), np.float32))
    seen = on_device(np.array([1 << 18]))
    assert index_topk(long, seen, 7).shape == (1, 7)
    assert candidate_blocks(long, seen, 8, 9).shape == (1, 9)
    assert [name for _, name, *_ in fake_cuda] == [
        *("scores_v4", "blocks_v1", "short_v4"),
        *("scores_v4", "settle_v3"),
        *("scores_v6", "encode_v5", "scores_v5", "repair_v5"),
        "parts_v4",
        *("maxima_v2", "parts_v4"),
    ]


def whole_numbers(records):
    """Records whose scales lie within 2^3 -> (N, 128) int and (N,) float: what score_int8.cuh makes
    of them, with its sums of whole words in which no byte may carry into the next.
    """
    table, codes = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.uint32), records[:, :64]
    top = records[:, 64:].max(axis=1).astype(int)
    shift = (records[:, 64:] - (top[:, None] - 3)).astype(np.uint32).repeat(32, axis=1)
    codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), 128)
    size = table[codes & 7] << shift
    plus, rest = np.where(codes < 8, size, 0).astype(np.uint8), (128 - size).astype(np.uint8)
    words = 2 * plus.view("<u4") + rest.view("<u4")
    return words.view(np.uint8).astype(int) - 128, np.exp2(np.float32(top) - 131)


def test_whole_numbers_times_one_power_of_two_are_the_keys():
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (500, 68), np.uint8)
    records[:, 64:] = rng.integers(110, 130, (500, 1)) + rng.integers(0, 4, (500, 4))
    numbers, factor = whole_numbers(records)
    assert np.abs(numbers).max() == 96
    assert np.array_equal(numbers * factor[:, None], INDEX_FP4.decode(records, 128))
    q = queries(3, 32, 128, OFFICIAL)[0]
    exponent = np.frexp(np.abs(q).max(axis=2))[1] - 7  # the largest number of a head is 2^6 to 112
    bytes_of = q * np.exp2(-np.float32(exponent))[:, :, None]
    assert np.array_equal(bytes_of, np.int8(bytes_of)) and np.abs(bytes_of).max() <= 112


@pytest.mark.parametrize("rows", [0, 1, 2, 31, 32, 133, 264, 1057, 8192])
@pytest.mark.parametrize("count", [16_385, 51_201, 1 << 20, (1 << 31) - (1 << 15)])
def test_parts_cover_a_row_and_fit_the_launch(fake_cuda, rows, count):  # noqa: F811
    from dsv41_kernels.orderedrows import MOST_PARTS, SPAN, split

    for parts, length in (split(rows, count), split(rows, count, 7)):
        assert length % SPAN == 0 and (parts - 1) * length < count <= parts * length
        assert 1 <= parts <= MOST_PARTS
    parts, _ = split(rows, count)
    assert parts == 1 or rows <= 65_535  # rows are the grid's second axis


def test_parts_of_many_long_rows_are_two_waves_of_blocks(fake_cuda):  # noqa: F811
    from dsv41_kernels.orderedrows import split

    parts = {
        (rows, count): split(rows, count)[0] for rows in (1, 32) for count in (1 << 19, 1 << 20)
    }
    assert parts == {(1, 1 << 19): 64, (1, 1 << 20): 128, (32, 1 << 19): 8, (32, 1 << 20): 16}
    assert split(64, 1 << 20)[0] == 8 and split(264, 1 << 20)[0] == 1


@pytest.mark.parametrize("tokens, count", [(0, 5), (5, 0), (1, 1), (1, 524_288), (15, 1000)])
def test_shares_of_keys_are_whole_turns_of_a_block(tokens, count):
    from dsv41_kernels.indexing import RUN, WARPS, equal_shares

    share = equal_shares(tokens, count)
    assert share % (32 * WARPS) == 0 and share % RUN == 0 and share > 0


def test_large_blocks_share_keys_among_all_processors():
    from dsv41_kernels.indexing import equal_shares

    for tokens, count, blocks in [(1, 524_288, 132), (32, 131_072, 128), (33, 131_072, 132)]:
        share = equal_shares(tokens, count, 16, 132, 32)
        assert share % 32 == 0 and tokens * -(-count // share) == blocks


def test_bad_arrays_are_refused_by_name(fake_cuda):  # noqa: F811
    q, w, entries = on_fake(*ragged([3, 20], [0, 0], 1, OFFICIAL))
    with pytest.raises(ValueError, match="w: expected shape"):
        choose_anywhere(q, w[:-1], entries, 6, None, OFFICIAL)
    with pytest.raises(TypeError, match="keys: expected uint8"):
        index_scores(q, w, on_device(normal(5, 32)), OFFICIAL)
    with pytest.raises(ValueError, match="keys: expected shape"):
        index_scores(q, w, entries.keys[:, :-1], OFFICIAL)
    with pytest.raises(TypeError, match="visible: expected a CUDA array"):
        index_topk(on_device(normal(2, 5)), np.array([5, 5]), 3)
    with pytest.raises(ValueError, match="keys: 23 lists"):
        index_scores(q, w, entries.keys[None], OFFICIAL)
    with pytest.raises(TypeError, match="order: expected int64"):
        choose_anywhere(q, w, replace(entries, order=on_device(np.zeros(23))), 6, None, OFFICIAL)
    assert not fake_cuda


def test_empty_batches_launch_nothing(fake_cuda):  # noqa: F811
    none = on_device(np.zeros(0, np.int64))
    assert index_topk(on_device(normal(0, 5)), none, 3).shape == (0, 3)
    assert candidate_blocks(on_device(normal(0, 5)), none, 2, 3).shape == (0, 3)
    q, w = on_fake(*queries(4, 4, 32, FLOAT32))
    assert index_scores(q, w, on_device(normal(0, 32)), FLOAT32).shape == (4, 0)
    assert paged_rows(on_device(np.zeros((0, 3), int)), none[:, None], 0, 4).shape == (0, 3)
    assert not fake_cuda


def test_pool_entries_of_the_blocks_a_kernel_writes_are_ascending():
    """What choose_in_pool relies on: columns of a list are in the order of their entries."""
    _, _, entries = ragged([60], [0], 1, FLOAT32)
    q, w = queries(60, 4, 32, FLOAT32)
    _, blocks = choose_anywhere(q, w, entries, 8, (4, 5), FLOAT32)
    for row in pool_entries(blocks, 4).tolist():
        used = [entry for entry in row if entry >= 0]
        assert used == sorted(used) and set(row[len(used) :]) <= {-1}
