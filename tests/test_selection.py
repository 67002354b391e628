"""A ragged batch: rows of pages, queries in blocks, and nobody's choice but one's own."""

from dataclasses import replace

import numpy as np
import oracles
import pytest
from compare import assert_same

from dsv41 import selection
from dsv41.cache import paged_rows
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.selection import Entries, choose_anywhere, choose_in_pool

EXACT = FLOAT32.but(batch_invariant=True)
LENGTHS, STARTS = [3, 1, 9], [0, 11, 4]  # new tokens of three requests, and those before them


def batch(numerics, page=4):
    """Three requests whose pages alternate -> q, w, Entries; ratio 1."""
    rng = np.random.default_rng(0)
    order = np.repeat(np.arange(3), LENGTHS)
    begins = np.cumsum(LENGTHS) - LENGTHS
    reach = np.arange(13) - begins[order] + np.array(STARTS)[order] + 1
    pages = np.array([[2, 0, 0, 0], [7, 1, 4, 0], [3, 0, 6, 5]])
    keys = numerics.index.encode(rng.standard_normal((8 * page, 32), np.float32))
    q = numerics.index.fake(numerics.store(rng.standard_normal((13, 2, 32), np.float32)))
    w = numerics.store(rng.standard_normal((13, 2), np.float32))
    spans = [(r, slice(b, b + n)) for r, (b, n) in enumerate(zip(begins, LENGTHS, strict=True))]
    return q, w, Entries(keys, pages, page, order, reach.copy(), spans, reach)


def test_entry_numbers_become_rows_by_hand():
    pages = np.array([[5, 0], [2, 9]])
    assert paged_rows(np.array([0, 3, 4, -1]), pages, 0, 4).tolist() == [20, 23, 0, -1]
    entries = np.array([[7, -1], [6, 1]])
    assert paged_rows(entries, pages, np.array([[0], [1]]), 4).tolist() == [[3, -1], [38, 9]]


@pytest.mark.parametrize("numerics", [EXACT, OFFICIAL.but(batch_invariant=True)])
def test_the_choice_of_each_query_is_a_sorted_list_s(numerics):
    q, w, entries = batch(numerics)
    chosen, blocks = choose_anywhere(q, w, entries, 5, (2, 3), numerics)
    inside = choose_in_pool(q, w, entries, blocks, 2, 5, numerics)
    for t, (r, seen) in enumerate(zip(entries.order, entries.reach, strict=True)):
        rows = [4 * entries.pages[r, j // 4] + j % 4 for j in range(seen)]
        scores = selection.indexer.index_scores(
            q[t : t + 1], w[t : t + 1], entries.keys[rows], numerics
        )
        row = dict(enumerate(scores[0].tolist()))
        pool = oracles.pool_blocks(row, range(seen), 2, 3)
        for got, want in (
            (chosen, oracles.best(row, 5)),
            (blocks, pool),
            (inside, oracles.best({j: row[j] for j in row if j // 2 in pool}, 5)),
        ):
            assert got[t].tolist() == want + [-1] * (got.shape[1] - len(want))


def test_no_pool_is_ranked_for_nobody():
    q, w, entries = batch(EXACT)
    chosen, blocks = choose_anywhere(q, w, entries, 5, None, EXACT)
    assert blocks is None
    assert_same("choice", chosen, choose_anywhere(q, w, entries, 5, (2, 3), EXACT)[0])


def test_a_query_sees_the_keys_of_its_own_request_alone():
    q, w, entries = batch(EXACT)
    usual = choose_anywhere(q, w, entries, 5, (2, 3), EXACT)
    foreign = np.ones(len(entries.keys), bool)
    foreign[[r for p in entries.pages[2] for r in range(4 * p, 4 * p + 4)]] = False
    keys = np.where(foreign[:, None], np.float32(np.nan), entries.keys)
    got = choose_anywhere(q[4:], w[4:], third(replace(entries, keys=keys)), 5, (2, 3), EXACT)
    for ours, theirs in zip(usual, got, strict=True):
        assert_same("of the third request", theirs, ours[4:])


def third(entries):
    """The queries of the last request as a batch of their own."""
    cut = {name: getattr(entries, name)[4:] for name in ("order", "visible", "reach")}
    return replace(entries, **cut, spans=[(2, slice(0, 9))])


@pytest.mark.parametrize("most", [1, 40])
def test_blocks_of_queries_change_nothing_and_show_every_score_once(monkeypatch, most):
    q, w, entries = batch(EXACT)
    usual, blocks = choose_anywhere(q, w, entries, 5, (2, 3), EXACT)
    monkeypatch.setattr(selection, "block_elements", lambda x: most)
    shown = []
    watch = lambda at, scores, numbers: shown.append((at, scores.shape, numbers))  # noqa: E731
    assert_same("choice", choose_anywhere(q, w, entries, 5, None, EXACT, watch)[0], usual)
    assert [t for at, *_ in shown for t in range(at.start, at.stop)] == list(range(13))
    assert all(shape[1] == entries.reach[at.stop - 1] for at, shape, _ in shown)
    shown.clear()
    inside = choose_in_pool(q, w, entries, blocks, 2, 5, EXACT, watch)
    monkeypatch.undo()
    assert_same("in the pool", inside, choose_in_pool(q, w, entries, blocks, 2, 5, EXACT))
    assert all(numbers.shape == shape for _, shape, numbers in shown)
