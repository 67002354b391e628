"""Gradients of attention by queries, sink and records that many queries share."""

import tracemalloc

import numpy as np
import pytest
from compare import assert_close, assert_same
from test_train_difference import check, random

from dsv41 import sparse_attn as forward
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.train import sparse_attn as train
from dsv41.train.sparse_attn import rope_sparse_attn_backward, sparse_attn_backward

FREQS = np.float32([0.7, 0.1])
CASES = {
    "both": ([[0, 1], [1, 2], [2, -1]], [[3, 0, 3], [1, -1, -1], [3, 2, 1]]),
    "a query without records": ([[-1, -1], [0, 2], [-1, -1]], [[-1], [1], [-1]]),
    "window only": ([[0], [0], [2]], [[], [], []]),
    "global only": ([[], [], []], [[0, 1], [1, -1], [3, 3]]),
    "one query": ([[2, 1]], [[1, 2]]),
    "nobody": (np.zeros((0, 2)), np.zeros((0, 1))),
}


def inputs(window_rows, heads=2, channels=6):
    return {
        "q": random(len(window_rows), heads, channels),
        "window": random(3, channels, seed=1),
        "global_kv": random(4, channels, seed=2),
        "sink": random(heads, seed=3),
    }


def check_attention(rows, **sizes):
    near, far = (np.array(r, np.int64) for r in rows)
    positions = np.arange(len(near)) * 3

    def function(q, window, global_kv, sink):
        reads = window, near, global_kv, far, sink, FLOAT32
        return forward.rope_sparse_attn(q, positions, FREQS, *reads)

    def backward(do, q, window, global_kv, sink):
        reads = window, near, global_kv, far, sink, FLOAT32
        return rope_sparse_attn_backward(do, q, positions, FREQS, *reads)[:4]

    check("attention", function, backward, inputs(near, **sizes))


@pytest.mark.parametrize("case", CASES)
def test_attention(case):
    check_attention(CASES[case])


@pytest.mark.parametrize("block", [1, 40])
def test_blocks_of_queries_share_records(monkeypatch, block):
    monkeypatch.setattr(train, "block_elements", lambda q: block)
    check_attention(CASES["both"])


def test_one_key_and_a_sink_by_hand():
    """q . k / sqrt(C) = 0 and sink = 0: p = 1/2, delta = 1/2 * (do . k), ds = 1/4 * (do . k)."""
    q, k, do = (
        np.array([[[0.0, 2, 0, 0]]]),
        np.array([[1.0, 0, 0, 0]]),
        np.array([[[3.0, 0, 0, 1]]]),
    )
    nothing = np.zeros((0, 4)), np.zeros((1, 0), np.int64)
    dq, dwindow, _, dsink, _ = sparse_attn_backward(
        do, q, k, np.array([[0]]), *nothing, np.zeros(1), FLOAT32
    )
    assert_close("dq", dq, [[[3 / 4 / 2, 0, 0, 0]]])
    assert_close("dk", dwindow, [[3 / 2, 3 / 4 / 2 * 2, 0, 1 / 2]])
    assert_close("dsink", dsink, [-3 / 4])


def test_share_is_what_the_heads_gave_out_of_the_joint_softmax():
    near, far = (np.array(r) for r in CASES["both"])
    values = inputs(near)
    reads = values["window"], near, values["global_kv"], far, values["sink"], FLOAT32
    share = sparse_attn_backward(values["q"], values["q"], *reads)[-1]
    for t in range(len(near)):
        want = np.zeros(3)
        for q, sink in zip(values["q"][t], values["sink"], strict=True):
            records = [(values["window"], j) for j in near[t]] + [
                (values["global_kv"], j) for j in far[t]
            ]
            s = [np.exp(kv[j] @ q / 6**0.5) if j >= 0 else 0 for kv, j in records]
            want += np.array(s)[2:] / (sum(s) + np.exp(sink)) / 2
        assert_close(f"query {t}", share[t], want, rel=1e-6)


def test_a_record_that_nobody_reads_gets_nothing_even_when_it_is_nan():
    near, far = (np.array(r) for r in CASES["both"])
    values = inputs(near)
    values["window"] = np.concatenate([values["window"], np.full((1, 6), np.nan)])
    out = sparse_attn_backward(
        values["q"],
        values["q"],
        values["window"],
        near,
        values["global_kv"],
        far,
        values["sink"],
        FLOAT32,
    )
    assert_same("unread", out[1][3], np.zeros(6))
    assert all(np.isfinite(x).all() for x in out)


def test_large_scores_do_not_overflow():
    near = np.array([[0, 1]])
    k, q = np.float32([[100, 0], [0, 100]]), np.float32([[[100, 0]]])
    nothing = np.zeros((0, 2), np.float32), np.zeros((1, 0), np.int64)
    for sink in (0.0, 1e4, -1e4):
        out = sparse_attn_backward(q, q, k, near, *nothing, np.float32([sink]), FLOAT32)
        assert all(np.isfinite(x).all() for x in out)


def test_stored_records_are_read_as_the_forward_reads_them():
    """bf16 probabilities aside, the gradient of quantised records is that of their values."""
    window, kv = np.float32(random(4, 64)), np.float32(random(5, 64, seed=1))
    stored = OFFICIAL.window_kv.encode(window), OFFICIAL.main_kv.encode(kv)
    values = OFFICIAL.window_kv.fake(window), OFFICIAL.main_kv.fake(kv)
    near, far = np.array([[0, 3], [3, -1]]), np.array([[4, 0], [0, -1]])
    q, do, sink = (
        np.float32(random(2, 3, 64)),
        np.float32(random(2, 3, 64, seed=2)),
        np.zeros(3, np.float32),
    )
    got = sparse_attn_backward(do, q, stored[0], near, stored[1], far, sink, OFFICIAL)
    want = sparse_attn_backward(do, q, values[0], near, values[1], far, sink, FLOAT32)
    for name, a, b in zip(("dq", "dwindow", "dglobal", "dsink", "share"), got, want, strict=True):
        assert_same(name, a, b)


def test_memory_grows_with_queries_and_records_not_with_their_product(monkeypatch):
    count, width = 3000, 4
    monkeypatch.setattr(train, "block_elements", lambda q: 1 << 14)
    q, kv = np.float32(random(count, 1, 8)), np.float32(random(count, 8))
    rows = np.random.default_rng(0).integers(0, count, (count, width))
    nothing = np.zeros((0, 8), np.float32), np.zeros((count, 0), np.int64)
    tracemalloc.start()
    sparse_attn_backward(q, q, kv, rows, *nothing, np.zeros(1, np.float32), FLOAT32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6 < 4 * count * count  # bytes; a (queries, records) array alone has 36 MB
