"""Which entries are chosen: scores, ties, hidden entries and the pool, down to the last index."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
from compare import assert_close, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.indexer import (
    block_scores,
    candidate_blocks,
    index_keys,
    index_queries,
    index_scores,
    index_topk,
    pool_entries,
    pool_topk,
)
from dsv41.quant import FLOAT32, INDEX_FP4, OFFICIAL
from dsv41.rope import frequencies
from dsv41.sparse_attn import sparse_attn

CONFIG = oracles.small_config()
INF = math.inf
# positions 10 and 11 are the best of all, and not visible to anybody here
HIERARCHY = [0.9, 0.1, 0.3, 0.8, 0.2, 0.7, 0.6, 0.5, -5, -6, 9.9, 9.9]


def one_row(scores):
    return np.array([scores], np.float32)


def count(*numbers):
    return np.array(numbers, np.int64)


def padded(rows, k):
    """Lists of numbers as one (T, k) array, -1 at the end of each row."""
    return np.array([[*row, *[-1] * (k - len(row))] for row in rows], np.int64).reshape(-1, k)


def the_best(scores, visible, k):
    """A sorted reference: the k best of the visible finite scores, the lower entry first."""
    return oracles.best({j: s for j, s in enumerate(scores[:visible])}, k)


# ---- scores -----------------------------------------------------------------------------------


def test_the_relu_is_per_head_and_a_negative_weight_counts():
    q = np.array([[[1, -1], [2, 1]]], np.float32)
    w = np.array([[1, -0.5]], np.float32)
    keys = np.array([[-1, 1], [1, 1]], np.float32)
    # dots are -2, -1 and 0, 3; a relu after the sum gives 0 for the second, none at all -1.5, -1.5
    assert index_scores(q, w, keys, FLOAT32).tolist() == [[0, -1.5]]
    listed = index_scores(q, w, keys[None, [1, 0, 1]], FLOAT32)
    assert listed.tolist() == [[-1.5, 0, -1.5]]


def test_the_head_weights_carry_the_scale_of_both_sizes():
    sizes = SimpleNamespace(index_n_heads=32, index_head_dim=128)
    p = {
        "wq_b": {"weight": np.zeros((32 * 128, 32), np.float32)},
        "weights_proj": {"weight": np.ones((32, 32), np.float32)},
    }
    x = np.zeros((1, 32), np.float32)
    x[0, 5] = 1
    freqs = np.ones(4, np.float32)
    for numerics in (FLOAT32, OFFICIAL):
        _, w = index_queries(x, x, p, count(0), freqs, sizes, numerics)
        assert w.dtype == np.float32 and w.tolist() == [[0.015625] * 32]


def random_indexer(seed):
    draw = np.random.default_rng(seed).standard_normal
    heads, width = CONFIG.index_n_heads, CONFIG.index_head_dim
    shapes = {
        "wk": (width, CONFIG.head_dim),
        "k_norm": (width,),
        "wq_b": (heads * width, CONFIG.q_lora_rank),
        "weights_proj": (heads, CONFIG.hidden_size),
    }
    return {name: {"weight": draw(shape, np.float32)} for name, shape in shapes.items()}


def test_queries_keys_and_scores_agree_with_the_loops():
    p, rng = random_indexer(0), np.random.default_rng(1)
    p64 = oracles.as_float64(p)
    x = rng.standard_normal((7, CONFIG.hidden_size), np.float32)
    c_q = rng.standard_normal((7, CONFIG.q_lora_rank), np.float32)
    latent = rng.standard_normal((5, CONFIG.head_dim), np.float32)
    positions, firsts = np.arange(40, 47), np.arange(5) * 2
    freqs, slow = frequencies(CONFIG, 2), oracles.frequencies(CONFIG, 2)
    keys = index_keys(latent, p, firsts, freqs, CONFIG, FLOAT32)
    q, w = index_queries(x, c_q, p, positions, freqs, CONFIG, FLOAT32)
    heads, width = CONFIG.index_n_heads, CONFIG.index_head_dim
    want_keys = []
    for v, position in zip(latent.astype(float), firsts.tolist(), strict=True):
        key = oracles.norm(p64["wk"]["weight"] @ v, p64["k_norm"]["weight"], CONFIG.rms_norm_eps)
        want_keys.append(oracles.rotated(key, position, slow))
    want = np.zeros((7, 5))
    for t in range(7):
        queries = (p64["wq_b"]["weight"] @ c_q[t].astype(float)).reshape(heads, width)
        queries = [oracles.rotated(head, int(positions[t]), slow) for head in queries]
        weights = p64["weights_proj"]["weight"] @ x[t].astype(float) / math.sqrt(heads * width)
        for j, key in enumerate(want_keys):
            want[t, j] = oracles.entry_score(queries, weights, key)
    assert_close("keys", keys, np.array(want_keys))
    assert_close("scores", index_scores(q, w, keys, FLOAT32), want)


def test_both_sides_of_the_dot_are_what_four_bits_hold():
    p, rng = random_indexer(2), np.random.default_rng(3)
    x = rng.standard_normal((3, CONFIG.hidden_size), np.float32)
    freqs = frequencies(CONFIG, 1)
    q, _ = index_queries(x, x, p, np.arange(3), freqs, CONFIG, OFFICIAL)
    assert_same("q", q, INDEX_FP4.fake(q))
    latent = rng.standard_normal((3, CONFIG.head_dim), np.float32)
    keys = index_keys(latent, p, np.arange(3), freqs, CONFIG, OFFICIAL)
    assert keys.dtype == np.uint8 and keys.shape == (3, CONFIG.index_head_dim * 17 // 32)


@pytest.mark.parametrize(
    "q, w, key, score",
    [
        ([[257]], [1.0078125], [1], 258),  # the dot: 256; at full width 259.0
        ([[3], [1]], [1.0078125, -3], [1], 0.03125),  # the weighted dot: 3.03, not 3.023
        ([[256], [1]], [1, 1], [1], 256),  # the sum over heads: 257
    ],
)
def test_every_stage_of_a_score_is_stored_as_bf16(q, w, key, score):
    stored = FLOAT32.but(bf16=True)
    arrays = [np.array([a], np.float32) for a in (q, w, key)]
    assert index_scores(*arrays, stored).tolist() == [[score]]
    assert index_scores(*arrays, FLOAT32).tolist() != [[score]]


@pytest.mark.parametrize("keys", [0, 1, 127, 128, 129, 300])
def test_a_score_in_fixed_blocks_does_not_depend_on_the_number_of_keys(keys):
    rng = np.random.default_rng(keys)
    q = rng.standard_normal((3, 2, 32), np.float32)
    w = rng.standard_normal((3, 2), np.float32)
    k = rng.standard_normal((400, 32), np.float32)
    exact = FLOAT32.but(batch_invariant=True)
    some = index_scores(q, w, k[:keys], exact)
    assert_same("fewer keys", some, index_scores(q, w, k, exact)[:, :keys])
    assert_same("one query", some[1:2], index_scores(q[1:2], w[1:2], k[:keys], exact))
    listed = np.repeat(k[None, :keys], 3, axis=0)
    assert_same("a list per query", some, index_scores(q, w, listed, exact))
    assert_close("plain product", index_scores(q, w, k[:keys], FLOAT32), some)


# ---- top-k ------------------------------------------------------------------------------------


def test_fewer_entries_than_k_leave_minus_one_which_reads_nothing():
    index = index_topk(one_row([0.2, 0.5]), count(2), 4)
    assert index.dtype == np.int64 and index.tolist() == [[0, 1, -1, -1]]
    # -1 is a legal NumPy index; the last row belongs to somebody else
    rows = np.array([[1, 0], [0, 1], [100, 100]], np.float32)
    q, sink = np.zeros((1, 1, 2), np.float32), np.array([-np.inf], np.float32)
    nothing, none = np.zeros((0, 2), np.float32), np.zeros((1, 0), np.int64)
    first = np.array([[0, -1, -1, -1]])
    assert sparse_attn(q, nothing, none, rows, first, sink, FLOAT32).tolist() == [[[1, 0]]]
    with pytest.raises(IndexError, match="global_rows: row 3 of 3"):
        sparse_attn(q, nothing, none, rows, np.array([[0, 3]]), sink, FLOAT32)


def test_equal_scores_are_taken_from_the_left():
    assert index_topk(one_row([1, 5, 5, 5, 5, 0]), count(6), 3).tolist() == [[1, 2, 3]]
    everything_equal = one_row([0.25] * 4096)
    assert_same("ties", index_topk(everything_equal, count(4096), 512), np.arange(512)[None])


def test_a_row_of_ties_is_chosen_the_same_way_in_any_company_and_every_time():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (9, 300)).astype(np.float32)
    scores[7] = np.repeat([1, 5, 5, 0], 75)
    visible = np.full(9, 300)
    alone = index_topk(scores[7:8], visible[7:8], 100)
    assert_same("hand", alone, np.arange(75, 175)[None])
    for _ in range(3):
        assert_same("row 7 of 9", index_topk(scores, visible, 100)[7:8], alone)


@pytest.mark.parametrize("size", range(5))
def test_every_short_row_against_a_sorted_reference(size):
    """All rows of up to four scores out of {-inf, -1, -0, +0, 1}, every visible count, every k."""
    values = [-INF, -1.0, -0.0, 0.0, 1.0]
    rows = list(itertools.product(values, repeat=size))
    for k in range(1, size + 2):
        for visible in range(size + 1):
            scores = np.array(rows, np.float32).reshape(len(rows), size)
            got = index_topk(scores, np.full(len(rows), visible), k)
            want = padded([the_best(row, visible, k) for row in rows], k)
            assert_same(f"k {k}, {visible} visible of {size}", got, want)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.integers(1, 40), st.integers(1, 6))
def test_rows_of_many_ties_against_a_sorted_reference(seed, size, k, distinct):
    rng = np.random.default_rng(seed)
    scores = rng.integers(-distinct, distinct + 1, (5, size)).astype(np.float32)
    scores[rng.random((5, size)) < 0.2] = -np.inf
    visible = rng.integers(0, size + 1, 5)
    want = [the_best(row, n, k) for row, n in zip(scores.tolist(), visible.tolist(), strict=True)]
    assert_same("top-k", index_topk(scores, visible, k), padded(want, k))


def test_no_query_and_no_entry_are_answered_with_the_right_shape():
    assert_same("no query", index_topk(np.zeros((0, 5), np.float32), count(), 3), padded([], 3))
    nothing = index_topk(np.zeros((2, 0), np.float32), count(0, 0), 3)
    assert_same("no entry", nothing, padded([[], []], 3))
    blocks = candidate_blocks(np.zeros((2, 0), np.float32), count(0, 0), 4, 3)
    assert_same("no block", blocks, padded([[], []], 3))


def test_the_scores_passed_in_are_not_changed():
    scores = one_row([3, 1, 2])
    scores.flags.writeable = False
    index_topk(scores, count(2), 1)
    candidate_blocks(scores, count(2), 2, 1)
    assert scores.tolist() == [[3, 1, 2]]


# ---- the pool ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "visible, blocks, final",
    [
        # the newest block {8, 9} holds the worst scores
        (9, [0, 4], [0, 1, 8]),
        (8, [0, 3], [0, 6, 7]),
        (1, [0, -1], [0, -1, -1]),
        (0, [-1, -1], [-1, -1, -1]),
    ],
)
def test_the_newest_block_is_pinned_and_the_choice_stays_inside_the_pool(visible, blocks, final):
    scores = one_row(HIERARCHY)
    if visible == 9:  # what the pool keeps this query from
        assert index_topk(scores, count(9), 3).tolist() == [[0, 3, 5]]
    kept = candidate_blocks(scores, count(visible), 2, 2)
    assert kept.tolist() == [blocks]
    entries = pool_entries(kept, 2)
    inside = np.take_along_axis(scores, np.maximum(entries, 0), axis=1)
    assert pool_topk(inside, entries, count(visible), 3).tolist() == [final]


def test_a_block_counts_by_its_visible_entries_only():
    scores = one_row([1, 9, 2, 8, 3, 7])
    got = block_scores(scores, count(4), 2)
    assert got.tolist() == [[9, INF, -INF]]
    assert block_scores(scores, count(1), 2).tolist() == [[INF, -INF, -INF]]
    assert block_scores(scores, count(3), 4).tolist() == [[INF, -INF]]
    assert block_scores(scores, count(5), 4).tolist() == [[9, INF]]


def test_equal_blocks_are_taken_from_the_left_and_dead_ones_never():
    scores = one_row([4, 0, 4, 4, -INF, -INF, 1, 1, 0])
    assert candidate_blocks(scores, count(9), 2, 3).tolist() == [[0, 1, 4]]
    assert candidate_blocks(scores, count(9), 2, 5).tolist() == [[0, 1, 3, 4, -1]]


def test_entries_of_a_block_are_neighbours_and_an_empty_block_has_none():
    assert pool_entries(np.array([[0, 3, -1]]), 3).tolist() == [[0, 1, 2, 9, 10, 11, -1, -1, -1]]
    assert pool_entries(np.zeros((2, 0), np.int64), 4).shape == (2, 0)


def test_a_pool_smaller_than_k_returns_what_it_has_and_nothing_masked():
    """One block of four and top-8: the release gives masked, visible entries back here."""
    entries = pool_entries(np.array([[1]]), 4)
    got = pool_topk(one_row([0, 3, 2, 1]), entries, count(7), 8)
    assert got.tolist() == [[4, 5, 6, -1, -1, -1, -1, -1]]
    low = pool_topk(one_row([-INF, 3, -INF, 1]), entries, count(8), 8)
    assert low.tolist() == [[5, 7, -1, -1, -1, -1, -1, -1]]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 33),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 9),
)
def test_hierarchical_choice_against_two_sorted_stages(seed, size, block_size, budget, k):
    """Ties everywhere; hidden entries hold the best scores; the last block is often cut short."""
    rng = np.random.default_rng(seed)
    visible = rng.integers(0, size + 1, 6)
    scores = rng.integers(-3, 4, (6, size)).astype(np.float32)
    scores[np.arange(size) >= visible[:, None]] = 99
    blocks = candidate_blocks(scores, visible, block_size, budget)
    entries = pool_entries(blocks, block_size)
    reach = np.pad(scores, ((0, 0), (0, block_size)), constant_values=99)
    inside = np.take_along_axis(reach, np.clip(entries, 0, reach.shape[1] - 1), axis=1)
    chosen = pool_topk(inside, entries, visible, k)
    for t, seen in enumerate(visible.tolist()):
        row = dict(enumerate(scores[t].tolist()))
        pool = oracles.pool_blocks(row, range(seen), block_size, budget)
        assert blocks[t].tolist() == pool + [-1] * (budget - len(pool))
        best = oracles.best({j: row[j] for j in range(seen) if j // block_size in pool}, k)
        assert chosen[t].tolist() == best + [-1] * (k - len(best))
