"""The indexer's kernels: scores to the bit, choices to the index, gradients to rounding."""

from dataclasses import replace

import numpy as np
import pytest
from fake_cuda import fake_cuda, on_device  # noqa: F401 (a fixture)

from dsv41.cache import paged_rows
from dsv41.indexer import candidate_blocks, index_scores, index_topk, pool_entries, pool_topk
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.selection import Entries, choose_anywhere, choose_in_pool
from dsv41.train.indexer import selection_backward

MODES = [FLOAT32, OFFICIAL, FLOAT32.but(bf16=True)]
SHAPES = [(4, 32), (3, 64), (32, 128)]  # heads, channels; the first is the miniature's


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


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
    records = keys((counts.sum() + 3) * per_page, channels, numerics)
    reach = (positions + 1) // ratio
    q, w = queries(len(order), heads, channels, numerics, seed)
    return q, w, Entries(records, pages, per_page, order, reach.copy(), spans, reach)


def moved(x, to):
    """x with its arrays passed through `to`; `reach` stays in CPU memory."""
    if isinstance(x, Entries):
        names = ("keys", "pages", "order", "visible")
        return replace(x, **{name: to(getattr(x, name)) for name in names})
    return to(x) if isinstance(x, np.ndarray) else x


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def cupy():
    found = pytest.importorskip("cupy", reason="needs CuPy: pip install dsv41[cuda13]")
    try:
        found.cuda.runtime.getDeviceCount()
    except found.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"needs a CUDA device: {error}")
    return found


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
        assert np.sum(error > 0) <= 0.02 * error.size


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
@pytest.mark.parametrize("listed", [1, 7, 512, 16384])
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
